"""Made-up weights of every format go the way of loaded ones, and are no easier to multiply with."""

from pathlib import Path

import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels.pack.matrix import QuantizedMatrix, dequantize, unpacked
from quire.plan.layout import layout
from quire.quantization.assigned import settled, with_formats
from quire.quantization.read import find_quantization
from quire.weights.dummy import SCALE, load_dummy

from ...support.filled_models import built
from ...support.quantized_checkpoints import FORMS
from .test_formats import Kept

RAW = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [0],
    "norm_topk_prob": True, "decoder_sparse_step": 1, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("form", [*FORMS, "online"])
def test_made_up_weights(form: str) -> None:
    args = parse_checkpoint_config(RAW)
    asked, raw = ("fp8", {}) if form == "online" else (None, {"quantization_config": FORMS[form].config})
    config = settled(find_quantization(Path("x"), raw, asked).config, layout(args), {})
    params = with_formats(layout(args), config)
    models = [Kept(args, params, frozenset()) for _ in range(2)]
    for model in models:
        load_dummy(model, 3)  # type: ignore[arg-type]
    seen = 0
    for name, weights in models[0].weights.items():
        for one, other in zip(weights, models[1].weights[name], strict=True):
            if not isinstance(one, QuantizedMatrix):
                continue
            seen += 1
            numbers = dequantize(one.check())
            low, high = (6 * 2**-9, 6 * 2**-3) if one.scheme.kind == "mxfp4" else (0.3 * SCALE, 2 * SCALE)
            assert numbers.isfinite().all() and low < numbers.abs().max() <= high
            assert torch.equal(numbers, dequantize(other)), "a seed means the same weights"
            if form != "online":
                codes = unpacked(one).contiguous().view(torch.uint8).unique()
                widened = form == "gptq-dynamic"  # experts of 4 bits
                assert len(codes) >= (16 if widened or one.scheme.bits == 4 else 250)
    assert seen == 2 + 2 + 2 + 3 * 2
    model = built(args, quantization=config)
    load_dummy(model, 3)
    assert model.head(model.norm(model.embed(torch.arange(4)))).isfinite().all()

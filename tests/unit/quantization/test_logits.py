"""Checkpoints of every format, run by Quire and, dequantized, by transformers in float32: the same logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from quire.args.checkpoint import read_checkpoint_config
from quire.layers.stack import Model
from quire.plan.layout import layout
from quire.quantization.assigned import settled
from quire.quantization.read import find_quantization
from quire.weights.load import load_weights

from ...support.filled_models import built
from ...support.full import full_rows
from ...support.quantized_checkpoints import FORMS, STATIC, Form, quantize_checkpoint
from ..models.test_against_transformers import run_paged, write_checkpoint
from .test_formats import stored_types

SIZES = {"hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 32}
DENSE = ("qwen3", SIZES)
EXPERTS = (
    "glm4_moe",
    SIZES
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "num_mtp_layers": 0,
        "attention_bias": True,
    },
)
LATENT = ("deepseek_v3", {
    "hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 96, "first_k_dense_replace": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_mtp_layers": 0})  # fmt: skip
SELECTING = {"index_n_heads": 32, "index_head_dim": 64, "index_topk": 5, "indexer_types": ["full", "shared"]}
SPARSE = ("glm_moe_dsa", LATENT[1] | SELECTING)
PROMPT = [3, 17, 42, 8, 91, 0, 55, 23, 64, 12, 77, 31, 5]


ENDS = ("proj", "proj_with_mqa", "wq_b", "wk")  # of the names of quantized layers


def rounded(x: Tensor, form: Form) -> Tensor:
    """Activations quantized by the rule of the format, and dequantized."""
    if not form.inputs:
        return x
    most = 448.0 if form.values == "fp8" else 127.0
    wide = 128 if form.inputs == "group" else x.shape[-1]
    parts = []
    for part in x.split(wide, -1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-10) / most
        scale = torch.full_like(scale, STATIC) if form.inputs == "tensor" else scale
        q = part / scale
        q = q.clamp(-448, 448).to(torch.float8_e4m3fn).float() if form.values == "fp8" else q.round().clamp(-128, 127)
        parts.append(q * scale)
    return torch.cat(parts, -1)


class Rounding(nn.Module):
    """A linear layer that quantizes its activations first."""

    def __init__(self, linear: nn.Linear, form: Form) -> None:
        super().__init__()
        self.linear, self.form = linear, form

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x, self.form), self.linear.weight, self.linear.bias)


class RoundingExperts(nn.Module):
    """The experts of transformers, each with quantized activations."""

    def __init__(self, experts: Any, form: Form) -> None:
        super().__init__()
        self.experts, self.form = experts, form

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(len(self.experts.gate_up_proj)):
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            x = rounded(hidden, self.form)
            gate, up = F.linear(x, self.experts.gate_up_proj[expert]).chunk(2, -1)
            inner = rounded(F.silu(gate) * up, self.form)
            out = out + share * F.linear(inner, self.experts.down_proj[expert])
        return out


def with_rounding(model: Any, form: Form) -> Any:
    """Replace the quantized layers of a dequantized model."""
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if isinstance(module, nn.Linear) and own.endswith(ENDS) and own not in ("kv_b_proj", "weights_proj"):
            setattr(model.get_submodule(parent), own, Rounding(module, form))
        elif own == "experts":
            setattr(model.get_submodule(parent), own, RoundingExperts(module, form))
    return model


def theirs(folder: Path, form: Form) -> tuple[Tensor, Tensor]:
    """Logits of the dequantized model with quantized activations, and without."""
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        plain = model(torch.tensor([PROMPT])).logits[0]
        return with_rounding(model, form)(torch.tensor([PROMPT])).logits[0], plain


def ours(folder: Path, asked: str | None = None) -> Model:
    args = read_checkpoint_config(folder)
    config = find_quantization(folder, json.loads((folder / "config.json").read_text()), asked).config
    model = built(args, quantization=settled(config, layout(args), stored_types(folder)))
    load_weights(model, folder)
    return model


def write(tmp_path: Path, case: tuple[str, dict[str, Any]], form: Form) -> tuple[Path, Path]:
    """A quantized checkpoint and the plain one of the same numbers."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_checkpoint(plain, *case)
    means = quantize_checkpoint(plain, quantized, form)
    for path in plain.glob("*.safetensors*"):
        path.unlink()
    save_file(means, plain / "model.safetensors", {"format": "pt"})
    return plain, quantized


# The first layer of the model with experts is dense; other models differ by the shapes of their matrices alone.
CASES = [(EXPERTS, form) for form in FORMS]
CASES += [(DENSE, "fp8-block"), (DENSE, "gptq-order"), (LATENT, "fp8-block"), (LATENT, "awq")]
CASES += [(SPARSE, "fp8-block"), (SPARSE, "ct-int8-channel")]
CASES += full_rows((DENSE, form) for form in FORMS)
CASES += full_rows((LATENT, form) for form in ("fp8-tensor", "ct-w4-order", "gptq-8", "ct-int8-channel"))


@pytest.mark.parametrize(("case", "form"), CASES, ids=lambda one: one if isinstance(one, str) else one[0])
def test_logits(tmp_path: Path, case: tuple[str, dict[str, Any]], form: str) -> None:
    plain, quantized = write(tmp_path, case, FORMS[form])
    expected, exact = theirs(plain, FORMS[form])
    (actual,) = run_paged(ours(quantized), [PROMPT], [[7, 1, 5]])
    assert expected.std() > 0.3, "logits too flat to tell anything"
    if not FORMS[form].inputs:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
        return
    # A number that lies between two quantized values may round either way: far less than all that rounding changes.
    changed = (expected - exact).abs().mean()
    assert changed > 1e-3 and (actual - expected).abs().mean() < 0.2 * changed

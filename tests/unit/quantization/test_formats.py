"""Every format, from a written checkpoint to the matrix that kernels pack: bit for bit the numbers of the formula."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.args.checkpoint import ModelArgs, read_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.params import Param
from quire.kernels.pack.matrix import QuantizedMatrix, dequantize
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks
from quire.quantization.assigned import settled, with_formats
from quire.quantization.formats import raw_tensors, tensor_names
from quire.quantization.read import find_quantization
from quire.weights.files import read_checkpoint
from quire.weights.load import load_weights

from ...support.filled_models import sliced
from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from ...support.thinned import thinned

DENSE = {
    "vocab_size": 64, "hidden_size": 160, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
GLM = {
    "model": "Glm4Moe", "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "partial_rotary_factor": 0.5, "num_key_value_heads": 2,
}  # fmt: skip
LATENT = {
    "model": "DeepseekV3", "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "q_lora_rank": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "num_hidden_layers": 2,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_mtp_layers": 0, "head_dim": None,
}  # fmt: skip
WIDE = {"model": "Qwen3", "head_dim": 128, "num_key_value_heads": 2}
CUT = WIDE | {"intermediate_size": 320}  # slices of 4 ranks cut groups of 32
MODELS: dict[str, dict[str, Any]] = {"qwen3": WIDE, "glm4_moe": GLM, "deepseek_v3": LATENT, "cut": CUT}


class Kept:
    """A model as a loader sees it, which keeps the weights."""

    def __init__(self, args: ModelArgs, params: tuple[Param, ...], elsewhere: frozenset[str]) -> None:
        self.args, self.layout, self.elsewhere = args, params, elsewhere
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._taken: dict[str, dict[int, Any]] = {}  # parameter -> place among its experts -> weight

    @property
    def weights(self) -> dict[str, list[Any]]:
        """By parameter, in the order of experts."""
        return {name: [weight for _, weight in sorted(places.items())] for name, places in self._taken.items()}

    def take(self, module: str, place: int, tensors: dict[str, Any]) -> None:
        for name, weight in tensors.items():
            self._taken.setdefault(f"{module}.{name}", {})[place] = weight

    def destination(self, module: str) -> None:
        return None

    def numbers(self, param: Param) -> Tensor:
        """The numbers of a parameter with its columns in the order of the checkpoint."""
        return torch.cat([numbers(weight) for weight in self.weights[param.name]])


def numbers(weight: Tensor | QuantizedMatrix) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    found = dequantize(weight.check())
    return found if weight.order is None else found[:, weight.order.argsort()]


@cache
def written(folder: Path, model: str) -> Path:
    """A plain random checkpoint of transformers."""
    torch.manual_seed(0)
    changes = {key: value for key, value in (DENSE | MODELS[model]).items() if key != "model" and value is not None}
    config = getattr(transformers, f"{MODELS[model]['model']}Config")(**changes)
    made = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    made.save_pretrained(folder / model)
    return folder / model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("plain")
    return lambda model: written(folder, model)


def stored_types(folder: Path) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in read_checkpoint(folder).tensors.items()}


def loaded(folder: Path, parallel: Parallel = ALONE, number: int = 0, asked: str | None = None) -> Kept:
    args = read_checkpoint_config(folder)
    config = find_quantization(folder, json.loads((folder / "config.json").read_text()), asked).config
    config = settled(config, layout(args), stored_types(folder))
    whole = with_formats(layout(args), config)
    params = with_formats(layout(args, list(ranks(args, parallel))[number]), config)
    model = Kept(args, params, frozenset(stored_names(whole)))
    load_weights(model, folder)  # type: ignore[arg-type]
    return model


def check(model: Kept, means: dict[str, Tensor]) -> None:
    for param in model.layout:
        expected = torch.cat([sliced(part, means[part.stored]) for part in param.parts])
        assert torch.equal(model.numbers(param), expected), param.name


@pytest.mark.parametrize("model", [name for name in MODELS if name != "cut"])
@pytest.mark.parametrize("form", FORMS)
def test_numbers(plain: Callable[[str], Path], tmp_path: Path, form: str, model: str) -> None:
    means = quantize_checkpoint(plain(model), tmp_path, FORMS[form])
    kept = loaded(tmp_path)
    check(kept, means)
    for param in kept.layout:
        assert list(tensor_names(param)) == [part.stored for raw in raw_tensors(param) for part in raw.parts]
    quantized = {param.name for param in kept.layout if isinstance(kept.weights[param.name][0], QuantizedMatrix)}
    assert {name.rpartition(".")[0] for name in quantized if "layers.0" in name} >= {
        "layers.0.attention.output",
        "layers.0.mlp.experts" if model == "glm4_moe" else "layers.0.mlp.down",
    }
    never = ("router.weight", "head.weight", "embed.weight", "kv_up.weight")
    assert not any(name.endswith(never) for name in quantized)


PLACED = (
    ("qwen3", Parallel(tp=2)),
    ("qwen3", Parallel(tp=4)),
    ("glm4_moe", Parallel(tp=2)),
    ("glm4_moe", Parallel(tp=2, dp=2, experts=True)),
    ("deepseek_v3", Parallel(tp=2)),
)


@pytest.mark.parametrize(("form", "model", "parallel"), thinned(FORMS, PLACED), ids=str)
def test_slices_of_ranks(
    plain: Callable[[str], Path], tmp_path: Path, form: str, model: str, parallel: Parallel
) -> None:
    """A slice holds the numbers of the whole, or is refused: where it would cut a group."""
    means = quantize_checkpoint(plain(model), tmp_path, FORMS[form])
    cut = 0
    for number in range(parallel.size):
        try:
            check(loaded(tmp_path, parallel, number), means)
        except ConfigError as error:
            cut += 1
            assert "columns" in str(error) and "use -tp 1" in str(error)
    assert cut == parallel.size * (form.endswith("-block") and model != "qwen3")


@pytest.mark.parametrize("form", ["ct-w4-zeros", "gptq-zeros", "awq", "ct-w8-group"])
def test_slices_that_cut_groups_keep_their_numbers(plain: Callable[[str], Path], tmp_path: Path, form: str) -> None:
    """Ranks read 80 of 320 columns, two and a half groups of 32: they become five groups of 16."""
    means = quantize_checkpoint(plain("cut"), tmp_path, FORMS[form])
    for number in range(4):
        model = loaded(tmp_path, Parallel(tp=4), number)
        check(model, means)
        groups = {one.name: one.scheme.block[1] for one in model.layout if one.scheme}
        assert groups["layers.0.mlp.down.weight"] == 16 and groups["layers.0.mlp.gate_up.weight"] == 32

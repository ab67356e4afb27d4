"""Bytes of quantized weights on a CPU: explain tells those that the packed weights of an engine have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.args.checkpoint import read_checkpoint_config
from quire.assemble.build import build_model
from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.kernels.linear import panels
from quire.kernels.native.library import missing
from quire.kernels.pack.panel_sizes import HUGE_PAGE, in_pages
from quire.plan.layout import layout
from quire.quantization.assigned import settled
from quire.quantization.read import find_quantization
from quire.weights.load import load_weights

from ...support.filled_models import planned
from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from ...support.tiny_models import Tiny, random_model

pytestmark = pytest.mark.skipif(bool(missing()), reason="this CPU has no panels")
SIZES = (("hidden_size", 160), ("intermediate_size", 320), ("moe_intermediate_size", 96), ("num_hidden_layers", 2))


def live(packed: Any) -> int:
    """Bytes of packed weights: the values of all experts lie in one piece of memory."""
    every: list[panels.Packed] = [packed] if isinstance(packed, panels.Packed) else packed
    own = [one.quantized for one in every]
    beside = [one for each in own if each for one in vars(each).values() if isinstance(one, Tensor)]
    return in_pages(sum(one.data.nbytes for one in every)) + sum(one.nbytes for one in beside)


def packed_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """(parameter, packed weight) of the quantized linear layers and experts."""
    for module in model.modules():
        kept = getattr(module, "packed", None)
        if isinstance(kept, list) and kept:
            yield from zip(
                (f"{module.at}.gate_up", f"{module.at}.down"),
                map(list, zip(*(one[:2] for one in kept), strict=True)),
                strict=True,
            )
        elif isinstance(kept, tuple) and isinstance(kept[0], panels.Packed) and kept[0].quantized:
            yield f"{module.at}.weight", kept[0]


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_packed_weights(form: str, tmp_path: Path) -> None:
    own = tuple(one for one in SIZES if one[0] != "moe_intermediate_size" or "block" not in form)
    random_model(Tiny(family="qwen3_moe", changes=own), 0).save_pretrained(tmp_path / "plain")
    folder = tmp_path / "quantized"
    quantize_checkpoint(tmp_path / "plain", folder, FORMS[form])
    raw = json.loads((folder / "config.json").read_text())
    args = read_checkpoint_config(folder)
    found = settled(find_quantization(folder, raw).config, layout(args), {})
    model = build_model(planned(args, quantization=found))
    load_weights(model, folder)
    config = EngineConfig.from_flat(model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True)
    report = plan_engine(config).describe()
    told = {one["name"]: one["bytes"] for layer in report["layers"] for one in layer["weights"]}
    floats = {name: one for name, one in load_file(folder / "model.safetensors").items() if "scale" in name}
    halves = all(one.dtype != torch.float32 for one in floats.values())
    kept = dict(packed_weights(model))
    assert {name for name in kept if ".experts." in name} and any(name.endswith("qkv.weight") for name in kept)
    for name, packed in kept.items():
        first = packed[0] if isinstance(packed, list) else packed
        if halves or first.quantized.scale.dtype != torch.float16:
            assert told[name] == live(packed), name


def test_pages() -> None:
    assert in_pages(HUGE_PAGE // 2 - 1) == HUGE_PAGE // 2 - 1
    assert in_pages(HUGE_PAGE // 2) == HUGE_PAGE and in_pages(HUGE_PAGE + 1) == 2 * HUGE_PAGE

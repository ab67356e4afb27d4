"""Memory while weights are quantized or converted: the packed model, two of the largest units, and one being packed."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.plan.layout import layout
from quire.quantization.assigned import with_formats
from quire.quantization.formats import num_bytes, raw_tensors
from quire.quantization.read import find_quantization
from quire.weights import unpacked
from quire.weights.load import load_weights
from quire.weights.units import load_units

from ...support.quantized_checkpoints import FORMS
from .test_formats import Kept

RAW = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


class Live:
    """Bytes of the tensors that were allocated and are not freed, and the most that there were at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as `memory.empty` does, and count."""
        made = torch.empty(shape, dtype=dtype, device=device)
        weakref.finalize(made, self._freed, made.nbytes)
        self.now += made.nbytes
        self.most = max(self.most, self.now)
        return made

    def _freed(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("form", ["online", "fp8-block", "ct-w4-group", "awq", "gptq-order"])
def test_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    args = parse_checkpoint_config(RAW)
    known: dict[str, Any] = {} if form == "online" else {"quantization_config": FORMS[form].config}
    params = with_formats(layout(args), find_quantization(tmp_path, known, "fp8" if form == "online" else None).config)
    stored = {}
    for raw in (raw for param in params for raw in raw_tensors(param)):
        for part in raw.parts:
            dtype = getattr(torch, raw.dtype or "float32")
            stored[part.stored] = torch.full(part.shape, 0x77777777 if dtype == torch.int32 else 1, dtype=dtype)
            if raw.name.endswith("order"):
                stored[part.stored] = torch.arange(part.shape[0], dtype=torch.int32) // 32
    save_file(stored, tmp_path / "model.safetensors")
    live, model = Live(), Kept(args, params, frozenset())
    monkeypatch.setattr(unpacked.memory, "empty", live.empty)
    load_weights(model, tmp_path)  # type: ignore[arg-type]
    packed, units = sum(num_bytes(one, 4) for one in params), list(load_units(params))
    largest = max(unit.num_bytes(4) for unit in units)
    one = max(num_bytes(param, 4) for param in params if param.scheme)
    assert live.most <= packed + 2 * largest + one < packed + 5 * largest
    kept = [one for weights in model.weights.values() for one in weights]
    parts = [[*one.tensors.values()] if isinstance(one, QuantizedMatrix) else [one] for one in kept]
    size = sum(part.nbytes for each in parts for part in each)
    assert packed == size and live.now <= size, "what was loaded is freed"
    if form == "online":
        assert live.most < 0.6 * sum(one.nbytes for one in stored.values()), "a model that only fits in FP8 loads"

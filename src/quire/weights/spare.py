"""Stored tensors that no parameter reads, because their format makes them superfluous: checked to be so. No torch."""

from collections.abc import Iterator, Sequence

import numpy as np

from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, Part, of_expert
from quire.quantization.formats import spare_names
from quire.weights.files import Checkpoint, StoredTensor

INTEGERS = {"I32": np.int32, "I64": np.int64}


def check_spare(checkpoint: Checkpoint, params: Sequence[Param]) -> None:
    """Raise WeightsError if a tensor that the loader ignores in a quantized checkpoint would change the model.

    The loader ignores, and this allows, a GPTQ bias of zeros for a layer without a bias, a `g_idx` that moves no
    column, and a `weight_shape` equal to the matrix's shape.
    """
    read = {part.stored for param in params for part in param.parts}  # a bias of the model
    for param in (one for whole in params for one in _alike(whole)):
        parts = {part.stored.rpartition(".")[0]: part for part in param.parts}
        for name in spare_names(param):
            module, _, kind = name.rpartition(".")
            stored = checkpoint.tensors.get(name)
            if kind == "bias" and parts[module].axis == 1 and parts[module].start:
                continue  # of ranks that share columns the first one adds the bias, and checks it
            why = _meaning(stored, kind, param, parts[module]) if stored is not None and name not in read else ""
            if why and stored is not None:
                raise WeightsError(
                    f"{stored.file.name}: {name} {why}: use the config.json that belongs to these weights."
                )


def _alike(param: Param) -> Iterator[Param]:
    """Yield the parts of a parameter that have one scheme: each expert where their schemes differ, else all of it."""
    yield from (of_expert(param, place, len(param.each)) for place in range(len(param.each)))
    if not param.each:
        yield param


def _meaning(stored: StoredTensor, kind: str, param: Param, part: Part) -> str:
    """Return what a spare tensor means after all; "" for nothing."""
    if kind not in ("bias", "g_idx", "weight_shape"):
        return ""
    raw = stored.read()
    if kind == "bias":
        return "is a bias that is not zero, and the model has none" if any(raw) else ""
    if stored.dtype not in INTEGERS:
        return f"is stored as {stored.dtype}, not as integers"
    found = np.frombuffer(raw, INTEGERS[stored.dtype])
    if kind == "weight_shape":
        return "" if tuple(found) == part.shape else f"is {found.tolist()}, config.json makes it {list(part.shape)}"
    assert param.stored is not None
    plain = np.arange(part.shape[1]) // (param.stored.block[1] or part.shape[1])
    return "" if np.array_equal(found, plain) else "permutes the columns, although desc_act is false"

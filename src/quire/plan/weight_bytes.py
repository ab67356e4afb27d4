"""Bytes of a rank's parameters, and of experts that move between ranks. No torch."""

from collections.abc import Iterable

from quire.contracts.parallel import Parallel
from quire.contracts.params import Param, fused
from quire.quantization.formats import num_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNDER_WAY = 32  # experts, of two matrices each, that a rank sends at a time: `MOST_SENT` of distributed/process_group


def unpacked_bytes(params: Iterable[Param], dtype: str) -> int:
    """Return the size of the parameters in bytes before packing. `dtype` counts for parameters that name no dtype."""
    return sum(num_bytes(one, ITEM_BYTES[one.dtype or dtype]) for one in params)


def mover_bytes(params: Iterable[Param], parallel: Parallel, dtype: str) -> int:
    """Return the bytes that a rank takes while the experts of its largest layer move; 0 if experts have fixed places.

    Experts for all its slots may come, and copies of experts are under way to other ranks.
    """
    layers: dict[str, list[Param]] = {}
    for param in params if parallel.redundant is not None else ():
        if param.shard == "experts":
            layers.setdefault(param.module, []).append(param)
    largest = max(layers.values(), key=lambda layer: unpacked_bytes(layer, dtype), default=[])
    if not largest:
        return 0
    whole, slots = unpacked_bytes(largest, dtype), fused(largest[0])[0]
    return whole + min(UNDER_WAY, slots * (parallel.expert_ranks - 1)) * (whole // slots)

"""Compiles the experts' exchange for GPUs that are not there; prints each kernel."""

import re
from typing import Any

import torch

from quire.contracts.scheme import Wire
from quire.kernels.comm import Peers
from quire.kernels.comm.exchange import Layout, Slots
from quire.kernels.comm.triton_exchange import combine, dispatch

from ..support.full import FULL
from .compiling import AbsentGpu, Made

EXPERTS = 128


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def check(made: Made) -> None:
    """Signals are of the whole system; rows of other ranks are read past L1, 16 bytes at a time, 8-bit rows 4 to 16."""
    for order in ("release", "acquire"):
        assert f"atom.global.{order}.sys.cas.b32" in made.ptx, made.ptx
    widths = set(re.findall(r"ld\.global\.cg(?:\.L1::\S+)?((?:\.v\d)?\.[bu]\d+)", made.ptx))
    assert ".v4.b32" in widths, (made.name, widths)
    assert ".b16" not in widths, (made.name, widths)
    assert made.stack <= 64, (made.stack, made)


def exchange(ranks: int, bound: int, hidden: int, top_k: int, **changes: Any) -> None:
    """Launch both kernels of an exchange."""
    each = changes.pop("each", 1)
    layout = Layout(ranks=ranks, rows=4096, hidden=hidden, top_k=top_k, item_bytes=2, **changes)
    addresses = empty(ranks, dtype=torch.int64)
    slots = Slots(
        Peers(addresses, addresses, 1, layout.num_bytes, 64), layout, empty(layout.num_bytes, dtype=torch.uint8), each
    )
    ints = (
        empty(bound * each, top_k, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        empty(EXPERTS, dtype=torch.int32),
    )
    ids, count, owner = ints
    x, weights = empty(bound * each, hidden), empty(bound * each, top_k, dtype=torch.float32)
    *_, y = dispatch(x, ids, weights, count, owner, slots, bound)
    combine(x, y, ids, count, owner, slots, bound)


BLOCKS = Wire("e4m3", 128)
POWERS = Wire("e4m3", 128, True)


def main() -> None:
    """Three ranks with few rows; a replica of two ranks; rows in 8 bits. With --full everything."""
    gpu = AbsentGpu(check)
    exchange(3, 1, 2560, 1)
    exchange(4, 64, 2048, 8, each=2)
    exchange(2, 4096, 7168, 8, wire=POWERS)
    if FULL:
        for gpu.capability in (90, 80):
            exchange_everything(gpu.capability)


def exchange_everything(capability: int) -> None:
    """Exchange among every number of ranks, with every number of rows."""
    for bound in (1, 64, 4096):
        for ranks, hidden, top_k in ((2, 2048, 8), (2, 2048, 6), (4, 7168, 8), (8, 7168, 8), (3, 2560, 1)):
            exchange(ranks, bound, hidden, top_k)
        exchange(4, bound, 2048, 8, each=2)
        exchange(2, bound, 2048, 8, wire=Wire("int8"))
        if capability >= 90:
            for wire in (BLOCKS, *((Wire("e4m3"), POWERS) if bound == 64 else ())):
                exchange(2, bound, 7168, 8, wire=wire)

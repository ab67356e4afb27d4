"""Compiles the products of adapters for sm_90 at the sizes of an 8B model; prints each kernel."""

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.lora import AdapterRows, AdapterWeights, OutputRun, most_tiles, tile_of
from quire.kernels.lora import triton as lora

from ..support.full import full_rows
from .compiling import AbsentGpu, Made

LAYERS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "output": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


def launch(tokens: int, rank: int, width: int, sizes: tuple[int, ...], out: torch.dtype = torch.bfloat16) -> None:
    """The two products of a linear layer, on tensors without storage."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    slots, firsts = 16, [sum(sizes[:number]) for number in range(len(sizes))]
    runs = tuple(OutputRun(number, firsts[number], size, firsts[number]) for number, size in enumerate(sizes))
    weights = AdapterWeights(
        empty(slots, len(sizes), rank, width), empty(slots, sum(sizes), rank), empty(slots, dtype=torch.int32), runs
    )
    tile = tile_of(tokens)
    tiles = most_tiles(tokens, slots, tile)
    tables = (empty(*shape, dtype=torch.int32) for shape in ((tokens,), (tokens,), (tiles, 3)))
    rows = AdapterRows(*tables, used=empty(1, dtype=torch.int32), early=True, tile=tile)
    inner = lora.shrink(empty(tokens, width), weights, rows)
    if lora.fuses(weights):
        lora.expand_gated(empty(tokens, sum(sizes)), inner, weights, rows, "silu")
    else:
        lora.expand(empty(tokens, sum(sizes), dtype=out), inner, weights, rows)


def launch_pairs(tokens: int, slots: int, experts: int, k: int, hidden: int, inner: int) -> None:
    """The products of the experts of a layer, of pairs (token, chosen expert)."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ids, weights, of_rows = empty(tokens, k, dtype=torch.int32), empty(tokens, k, dtype=torch.float32), (tokens,)
    rows = lora.pair_rows(ids, None, empty(*of_rows, dtype=torch.int32), slots, experts)
    runs = OutputRun(0, 0, inner, 0), OutputRun(1, inner, inner, inner)
    for x, sizes, scales in (
        (empty(tokens, hidden), (2, hidden, 2 * inner), None),
        (empty(tokens * k, inner), (1, inner, hidden), weights),
    ):
        modules, width, outputs = sizes
        own = AdapterWeights(
            empty(slots, experts, modules, 16, width),
            empty(slots, experts, outputs, 16),
            empty(slots, experts, dtype=torch.int32),
            runs if modules == 2 else (OutputRun(0, 0, hidden, 0),),
        )
        lora.expand(empty(tokens * k, outputs), lora.shrink(x, own, rows, scales=scales), own, rows)


def fits(made: Made) -> None:
    """No number of a program is spilled."""
    assert made.stack == 0, made


def main() -> None:
    """Ranks 16 and 64, decodes and prompts, with and without dependent launches."""
    AbsentGpu(fits)
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for rank in (16, 64, *full_rows((128, 256))):
            for tokens in (64, *full_rows((1, 256, 2048))):
                for name in ("qkv", "gate_up", "down", *full_rows(("output",))):
                    launch(tokens, rank, *LAYERS[name])
        launch_pairs(64, 16, 128, 8, 2048, 768)
        for slots in full_rows((64,)):
            launch_pairs(2048, slots, 128, 8, 2048, 768)
    launch(64, 16, 4096, (128256,), torch.float32)

"""Inputs for adapters of a linear layer: slots with adapters of several ranks, and rows that have one or none."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows, AdapterWeights, OutputRun, grouped


class LoraInputs(NamedTuple):
    """Rows x [T, K], the result y [T, N] to add to, matrices, and the adapters of the rows."""

    x: Tensor
    y: Tensor
    weights: AdapterWeights
    rows: AdapterRows


def make_inputs(
    slots: "list[int]",
    sizes: tuple[int, ...],
    width: int,
    rank: int,
    *,
    ranks: "list[int]",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> LoraInputs:
    """Return random inputs.

    slots   of each row, -1: it has no adapter
    sizes   outputs of each module; K is `width`, and each module has room for `rank` ranks
    ranks   of the adapter of each slot
    """
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(len(ranks), len(sizes), rank, width, generator=random) / width**0.5
    b = torch.randn(len(ranks), sum(sizes), rank, generator=random)
    for slot, own in enumerate(ranks):
        a[slot, :, own:] = torch.nan  # is never read
        b[slot, :, own:] = torch.nan
    firsts = np.cumsum((0, *sizes)).tolist()
    runs = tuple(OutputRun(number, firsts[number], size, firsts[number]) for number, size in enumerate(sizes))
    x, y = (torch.randn(len(slots), size, generator=random).to(device, dtype) for size in (width, sum(sizes)))
    weights = AdapterWeights(
        a.to(device, dtype), b.to(device, dtype), torch.tensor(ranks, dtype=torch.int32, device=device), runs
    )
    return LoraInputs(x, y, weights, grouped(np.array(slots, np.int32), torch.device(device)))

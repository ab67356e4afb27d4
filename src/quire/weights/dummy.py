"""Random weights for measurements: no file is read."""

import torch

from quire.kernels.native import memory
from quire.layers.stack import Model
from quire.weights.units import load_units

TILE = 1 << 20  # elements; small enough to stay in the cache, so that filling is bound by writing
SCALE = 1e-3


def load_dummy(model: Model, seed: int = 0, device: torch.device | None = None) -> None:
    """Give every layer tensors of uniform values in +-1e-3: one random tile from `seed`, repeated on the device.

    device   where tensors are made and packed before they move to the model's; None: the model's own
    The tile is drawn on the CPU, so that a seed means the same weights on every device.
    """
    tile = torch.empty(TILE).uniform_(-SCALE, SCALE, generator=torch.Generator().manual_seed(seed))
    tiles: dict[torch.dtype, torch.Tensor] = {}
    device = device or model.device
    for unit in load_units(model.layout):
        tensors = {}
        for raw in unit.tensors:
            dtype = getattr(torch, raw.dtype) if raw.dtype else model.dtype
            if dtype not in tiles:
                tiles[dtype] = tile.to(device, dtype)
            source = tiles[dtype]
            made = tensors[raw.name] = memory.empty(raw.shape, dtype, device)
            flat = made.view(-1)
            whole = flat.numel() // TILE * TILE
            flat[:whole].view(-1, TILE).copy_(source)
            flat[whole:].copy_(source[: flat.numel() - whole])
        model.take(unit.module, unit.place, tensors)

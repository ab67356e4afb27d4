"""Random weights for measurements: no file is read."""

import torch
from torch import Tensor

from quire.layers.stack import Model
from quire.weights.unpacked import Unpacked

TILE = 1 << 20  # elements; small enough to stay in the cache, so that filling is bound by writing
SCALE = 1e-3


def load_dummy(model: Model, seed: int = 0, device: torch.device | None = None) -> None:
    """Give every layer tensors of uniform values in +-1e-3: one random tile from `seed`, repeated on the device.

    device   where tensors are made and packed before they move to the model's; None: the model's own
    The tile is drawn on the CPU, so that a seed means the same weights on every device.
    """
    tile = torch.empty(TILE).uniform_(-SCALE, SCALE, generator=torch.Generator().manual_seed(seed))
    tiles: dict[torch.dtype, Tensor] = {}
    device = device or model.device
    unpacked = Unpacked(model, device)
    for unit in unpacked.units():
        tensors = unpacked.tensors(unit)
        for made in tensors.values():
            if made.dtype not in tiles:
                tiles[made.dtype] = tile.to(device, made.dtype)
            _repeat(tiles[made.dtype], made.view(-1))
        unpacked.done(unit, tensors)


def _repeat(tile: Tensor, out: Tensor) -> None:
    """Fill `out` with copies of the tile, the last one cut: two launches at most."""
    whole = out.numel() // TILE * TILE
    if whole:
        out[:whole].view(-1, TILE).copy_(tile)
    if rest := out.numel() - whole:
        out[whole:].copy_(tile[:rest])

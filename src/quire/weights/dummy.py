"""Random weights for measurements: no file is read."""

import torch

from quire.layers.stack import Model

TILE = 1 << 20  # elements; small enough to stay in the cache, so that filling is bound by writing
SCALE = 1e-3


def load_dummy(model: Model, seed: int = 0) -> None:
    """Fill every parameter with uniform values in +-1e-3: one random tile from `seed`, repeated on the device.

    The tile is drawn on the CPU, so that a seed means the same weights on every device.
    """
    tile = torch.empty(TILE).uniform_(-SCALE, SCALE, generator=torch.Generator().manual_seed(seed))
    tiles: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for _, parameter in model.named_parameters():
        source = tiles.get((parameter.dtype, parameter.device))
        if source is None:
            source = tiles[parameter.dtype, parameter.device] = tile.to(parameter.device, parameter.dtype)
        flat = parameter.data.view(-1)
        whole = flat.numel() // TILE * TILE
        flat[:whole].view(-1, TILE).copy_(source)
        flat[whole:].copy_(source[: flat.numel() - whole])

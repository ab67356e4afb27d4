"""Random weights for measurements: no file is read."""

import torch
from torch import Tensor

from quire.kernels.pack.dummy import DummyTensors, repeat
from quire.layers.stack import Model
from quire.weights.unpacked import Unpacked

TILE = 1 << 20  # elements; small enough to stay in the cache, so that filling is bound by writing
SCALE = 1e-3


def load_dummy(model: Model, seed: int = 0, device: torch.device | None = None) -> None:
    """Fill a model with random weights (load_format=dummy): uniform values in +-1e-3, without reading files.

    Quantized weights are made in the checkpoint's format, then converted and packed like loaded weights. A block of
    random numbers is drawn on the CPU and repeated, so a seed gives the same weights on every device.

    device   the weights are made and packed there, then moved to the model's device; None: the model's device
    """
    tile = torch.empty(TILE).uniform_(-SCALE, SCALE, generator=torch.Generator().manual_seed(seed))
    tiles: dict[torch.dtype, Tensor] = {}
    device = device or model.device
    unpacked = Unpacked(model, device)
    made_up = DummyTensors(SCALE, seed, TILE, device) if any(param.stored for param in model.layout) else None
    for unit in unpacked.units():
        tensors, quantized = unpacked.tensors(unit), {param.name: param for param in unit.params if param.stored}
        for name, made in tensors.items():
            param = quantized.get(f"{unit.module}.{name.partition('.')[0]}")
            if param is not None and made_up is not None:
                made_up.fill(param, name.rpartition(".")[2], made)
                continue
            if made.dtype not in tiles:
                tiles[made.dtype] = tile.to(device, made.dtype)
            repeat(tiles[made.dtype], made.view(-1))
        unpacked.done(unit, tensors)
    unpacked.check()

"""The CPU's loader: every file read once, front to back, every tensor copied to the rows its name says."""

import mmap
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from quire.layers.stack import Model
from quire.quantization import unquantized
from quire.weights.plan import DTYPES, LoadPlan, Place, plan_load

Progress = Callable[[int, int], None]  # (bytes done, bytes total)


def load_weights(model: Model, folder: Path, progress: Progress | None = None) -> None:
    """Fill the parameters of `model` (not packed yet) from the safetensors files in `folder`, converting dtypes.

    Raises WeightsError in one line naming file, tensor and fix. `progress(done, total)` is called after each tensor.
    """
    plan = plan_load(model, folder)
    total, done = plan.num_bytes, 0
    for place, data in _read(plan):
        unquantized.load(place.parameter.data, data, place.rows)
        done += data.numel() * data.element_size()
        if progress is not None:
            progress(done, total)


def _read(plan: LoadPlan) -> Iterator[tuple[Place, Tensor]]:
    """Tensors in file order, each a view of the mapped file."""
    for path, tensors in groupby(plan.tensors, key=lambda pair: pair[0].file):
        with path.open("rb") as file:  # the map closes itself when the last tensor that looks into it is gone
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        for stored, place in tensors:
            count = torch.Size(stored.shape).numel()
            data = torch.frombuffer(mapped, dtype=DTYPES[stored.dtype], count=count, offset=stored.offset)
            yield place, data.view(stored.shape)

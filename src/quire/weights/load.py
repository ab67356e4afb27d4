"""The loader: from files to packed layers, a unit at a time, without a second copy of the model.

Units come in the order of the layers. When all bytes of a unit have arrived, its rows are put in the kernels' order,
its layer packs it, and its raw tensors are freed. Units under way hold at most twice the bytes of the largest unit, so
the peak is the packed model, two of the largest units, and the threads' buffers. Experts of a layer with a destination
are one unit, which is read into the layer's memory (`unpacked.py`) and needs no more. Knows nothing of names:
`match.py` proves that every part of every parameter is read exactly once.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from quire.contracts.params import Part
from quire.layers.stack import Model
from quire.weights.digest import SliceSums
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint
from quire.weights.match import match_tensors
from quire.weights.read_threads import Lanes, OpenUnit, ReadChunker
from quire.weights.slices import SliceBytes, order_rows, slice_bytes
from quire.weights.spare import check_spare
from quire.weights.units import LoadUnit
from quire.weights.unpacked import Unpacked

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
CHUNK = 8 << 20  # bytes; two per thread are pinned
GPU_THREADS = 8  # one thread reads the page cache at 5 to 10 GB/s, PCIe 5 takes about 50
CPU_THREADS = 2


@dataclass(frozen=True)
class LoadReport:
    """Bytes that were read from files, and the seconds that loading took.

    sums   report of the slices' sums, for `join_sums`; b"": they were not summed
    """

    num_bytes: int
    seconds: float
    sums: bytes = b""

    def __str__(self) -> str:
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.num_bytes / 1e9:.2f} GB in {self.seconds:.2f} s ({rate:.1f} GB/s)"


def load_weights(
    model: Model,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    device: torch.device | None = None,
    num_threads: int = 0,
    chunk_bytes: int = CHUNK,
    summed_as: str = "",
    again: bool = False,
) -> LoadReport:
    """Load a model's weights, or this rank's slices of them, from the safetensors files in `folder`.

    progress   called with (bytes done, bytes in all) by this thread, a few times a second and at the end
    device     weights are loaded and packed there, then moved to the model's device; None: the model's device
    num_threads   threads that read; 0: GPU_THREADS or CPU_THREADS, by device
    summed_as   role of the model in the sums of what is read (`digest.py`); "": nothing is summed
    again      True: the model has weights, which are replaced where they lie (`layers/in_place.py`)
    Raises WeightsError in one line naming file, tensor and fix, also for a file that cannot be read to its end.
    """
    began = perf_counter()
    checkpoint, headers = prove(model, folder)
    device = device or model.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    unpacked = Unpacked(model, device, again=again)
    units = deque(unpacked.units())
    parts = (part for unit in units for raw in unit.tensors for part in raw.parts)
    total = sum(slice_bytes(headers[part.stored], part).num_bytes for part in parts)
    num_threads = num_threads or (GPU_THREADS if device.type == "cuda" else CPU_THREADS)
    sums = SliceSums(summed_as, device) if summed_as else None
    with Lanes(checkpoint.files, device, num_threads, chunk_bytes, sums) as lanes:
        _run(
            units,
            unpacked,
            lanes,
            lambda unit, chunks: _open(unit, unpacked.tensors(unit), chunks, headers, sums),
            lambda: progress(lanes.num_bytes, total) if progress else None,
            model.dtype.itemsize,
        )
    unpacked.check()
    return LoadReport(total, perf_counter() - began, sums.report() if sums else b"")


def prove(model: Model, folder: Path) -> tuple[Checkpoint, Mapping[str, StoredTensor]]:
    """Check that the files in `folder` have every tensor of the model, and no other. No tensor is read.

    Returns the checkpoint, and name -> header of the tensors that this rank reads. Raises WeightsError.
    """
    checkpoint = read_checkpoint(Path(folder))
    headers = match_tensors(checkpoint, model.layout, model.args, model.elsewhere)
    check_spare(checkpoint, model.layout)
    return checkpoint, headers


def _run(
    units: deque[LoadUnit],
    unpacked: Unpacked,
    lanes: Lanes,
    open_unit: "Callable[[LoadUnit, ReadChunker], OpenUnit]",
    tell: Callable[[], None],
    item: int,
) -> None:
    """Open units as far as there is room for them, and pack each as soon as it is complete.

    item   bytes of a number of the model's dtype
    """
    most, under_way, missing = 2 * max(unit.num_bytes(item) for unit in units), 0, len(units)
    chunks = ReadChunker(lanes.add, lanes.chunk_bytes)
    tell()
    while missing:
        while units and (not under_way or under_way + units[0].num_bytes(item) <= most):
            under_way += units[0].num_bytes(item)
            lanes.watch(open_unit(units.popleft(), chunks))
        chunks.flush()
        for done in lanes.completed():
            if lanes.sums is not None:
                lanes.sums.add_on_device(done.slices)
            unpacked.done(done.unit, _ordered(done))
            under_way -= done.unit.num_bytes(item)
            missing -= 1
        tell()


def _open(
    unit: LoadUnit,
    tensors: dict[str, Tensor],
    chunks: ReadChunker,
    headers: Mapping[str, StoredTensor],
    sums: SliceSums | None,
) -> OpenUnit:
    """Plan the reads that fill a unit's tensors, in the order in which they lie in the files."""
    reads: list[tuple[StoredTensor, Part, SliceBytes, Tensor, int]] = []
    for raw in unit.tensors:
        first, target = 0, tensors[raw.name].view(-1)
        for part in raw.parts:
            stored = headers[part.stored]
            reads.append((stored, part, slice_bytes(stored, part), target, first))
            first += prod(part.local_shape)
    opened = OpenUnit(unit, tensors, sum(own.num_bytes for _, _, own, *_ in reads))
    for stored, part, own, target, first in sorted(reads, key=_place):
        index, dtype = None if sums is None else sums.slice(stored, part), DTYPES[stored.dtype]
        if index is not None and sums is not None and sums.on_device and dtype == target.dtype:
            opened.slices.append((index, target.narrow(0, first, prod(part.local_shape))))
            index = None
        chunks.add(opened, stored.file, own.runs(stored.offset), target, dtype, first=first, index=index)
    return opened


def _place(read: tuple[StoredTensor, Part, SliceBytes, Tensor, int]) -> tuple[Path, int]:
    """Return file and first byte of a read."""
    stored, _, own, *_ = read
    return stored.file, stored.offset + own.offset + own.base


def _ordered(done: OpenUnit) -> dict[str, Tensor]:
    """Put the rows of every part in the order that kernels need, and return the raw tensors."""
    for raw in done.unit.tensors:
        first = 0
        for part in raw.parts:
            order_rows(done.tensors[raw.name], first, part)
            first += part.rows
    return done.tensors

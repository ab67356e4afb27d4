"""The loader: from files to packed layers, a unit at a time, without a second copy of the model.

Units come in the order of the layers. When all bytes of a unit have arrived, its rows are put in the kernels' order,
its layer packs it, and the raw tensors go. Units under way hold at most twice the bytes of the largest unit, so the
peak is the packed model, two of the largest units, and the threads' buffers. Knows nothing of names: `match.py` proves
that every part of every parameter is read exactly once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from quire.contracts.params import Part
from quire.kernels.native import memory
from quire.layers.stack import Model
from quire.weights.files import StoredTensor, read_checkpoint
from quire.weights.lanes import ChunkWriter, Lanes, OpenUnit
from quire.weights.match import match_tensors
from quire.weights.units import LoadUnit, load_units

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
CHUNK = 8 << 20  # bytes; two per thread are pinned
GPU_THREADS = 8  # one thread reads the page cache at 5 to 10 GB/s, PCIe 5 takes about 50
CPU_THREADS = 2


@dataclass(frozen=True)
class LoadReport:
    """The bytes that were read from files, and the seconds it took."""

    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.num_bytes / 1e9:.2f} GB in {self.seconds:.2f} s ({rate:.1f} GB/s)"


def load_weights(model: Model, folder: Path, progress: Callable[[int, int], None] | None = None, *,
                 device: torch.device | None = None, num_threads: int = 0, chunk_bytes: int = CHUNK) -> LoadReport:
    """Read the slices of a model's parameters from the safetensors files in `folder`, and have its layers pack them.

    progress   told (bytes done, bytes in all) by this thread, a few times a second and at the end
    device     where tensors are loaded and packed before they move to the model's; None: the model's own
    num_threads   that read; 0: as many as the device likes
    Raises WeightsError in one line naming file, tensor and fix, also for a file that cannot be read to its end.
    """
    began, checkpoint = perf_counter(), read_checkpoint(Path(folder))
    headers = match_tensors(checkpoint, model.layout, model.args, model.elsewhere)
    device = device or model.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    units = deque(load_units(model.layout))
    parts = (part for unit in units for raw in unit.tensors for part in raw.parts)
    total = sum(_stored_bytes(headers[part.stored], part) for part in parts)
    num_threads = num_threads or (GPU_THREADS if device.type == "cuda" else CPU_THREADS)
    with Lanes(checkpoint.files, device, num_threads, chunk_bytes) as lanes:
        _run(model, units, lanes, lambda unit, chunks: _open(unit, chunks, headers, model.dtype, device),
             lambda: progress(lanes.num_bytes, total) if progress else None)  # fmt: skip
    return LoadReport(total, perf_counter() - began)


def _run(model: Model, units: deque[LoadUnit], lanes: Lanes, open_unit: "Callable[[LoadUnit, ChunkWriter], OpenUnit]",
         tell: Callable[[], None]) -> None:
    """Open units as far as there is room for them, and pack each as soon as it is complete."""
    most, under_way, chunks = 2 * max(unit.num_elements for unit in units), 0, ChunkWriter(lanes.add, lanes.chunk_bytes)
    tell()
    while units or under_way:
        while units and (not under_way or under_way + units[0].num_elements <= most):
            under_way += units[0].num_elements
            lanes.watch(open_unit(units.popleft(), chunks))
        chunks.flush()
        for done in lanes.completed():
            model.take(done.unit.module, done.unit.place, _ordered(done))
            under_way -= done.unit.num_elements
        tell()


def _open(unit: LoadUnit, chunks: ChunkWriter, headers: Mapping[str, StoredTensor], dtype: torch.dtype,
          device: torch.device) -> OpenUnit:
    """Allocate a unit's raw tensors, and plan the reads that fill them in the order in which they lie in the files."""
    tensors, reads = {}, []
    for raw in unit.tensors:
        target = tensors[raw.name] = memory.empty(raw.shape, getattr(torch, raw.dtype) if raw.dtype else dtype, device)
        first = 0
        for part in raw.parts:
            stored = headers[part.stored]
            reads.append((stored.file, stored.offset, part, stored, target.narrow(0, first, part.rows).view(-1)))
            first += part.rows
    opened = OpenUnit(unit, tensors, sum(_stored_bytes(stored, part) for *_, part, stored, _ in reads))
    for *_, part, stored, target in sorted(reads, key=lambda read: read[:2]):
        chunks.add(opened, stored.file, _runs(stored, part), target, DTYPES[stored.dtype])
    return opened


def _stored_bytes(stored: StoredTensor, part: Part) -> int:
    """Bytes of the slice that is read."""
    return stored.num_bytes // part.shape[part.axis] * part.count


def _runs(stored: StoredTensor, part: Part) -> Iterable[tuple[int, int]]:
    """Offset and bytes of each run of a file that holds the slice: one for rows, one for each row for columns."""
    row = stored.num_bytes // part.shape[0]
    if part.axis == 0 or part.whole:
        return [(stored.offset + part.start * row * (part.axis == 0), _stored_bytes(stored, part))]
    item = row // part.shape[1]
    return [(stored.offset + i * row + part.start * item, part.count * item) for i in range(part.shape[0])]


def _ordered(done: OpenUnit) -> dict[str, Tensor]:
    """The raw tensors, with the rows of every part in the order that the kernels want."""
    for raw in done.unit.tensors:
        first = 0
        for part in raw.parts:
            if part.order:
                rows = done.tensors[raw.name].narrow(0, first, part.rows).unflatten(0, (-1, len(part.order)))
                rows.copy_(rows[:, torch.tensor(part.order, device=rows.device)])
            first += part.rows
    return done.tensors

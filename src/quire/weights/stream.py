"""The GPU's loader: file to device through a few pinned buffers, without a copy of the model in the CPU's memory.

    file -- preadv, several threads --> pinned buffer -- copy on the thread's own stream --> the parameter's rows
    each thread has two buffers: while one is copied to the device, the next chunk is read into the other

Chunks are runs of bytes as they lie in the file and may hold many tensors or a piece of one. Bytes of a tensor whose
dtype is the parameter's go straight to its storage; others are converted on the device. On the CPU it does the same
without streams, for tests. Knows nothing of names: `plan.py` says what goes where and proves that nothing is missing.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from quire.contracts.errors import WeightsError
from quire.layers.stack import Model
from quire.weights.plan import DTYPES, LoadPlan, LoadReport, plan_load

CHUNK = 8 << 20  # bytes; two per thread are pinned
NUM_THREADS = 8  # one thread reads the page cache at 5 to 10 GB/s, PCIe 5 takes about 50
BUFFERS = 2
TICK = 0.1  # seconds between calls of `progress`


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor inside a chunk: from `start` on, elements of `dtype` for the flat `target`."""

    start: int
    num_bytes: int
    target: Tensor
    dtype: torch.dtype


@dataclass
class Chunk:
    """A run of bytes of a file and the pieces in it."""

    file: Path
    offset: int
    num_bytes: int
    pieces: list[Piece]


def stream_weights(model: Model, folder: Path, progress: Callable[[int, int], None] | None = None, *,
                   num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK) -> LoadReport:
    """Fill the parameters of `model` (not packed yet) as `load_weights` does; all are loaded when it returns.

    Raises WeightsError as `load_weights` does, and for a file that cannot be read to its end. `progress(done, total)`
    is called by the caller's thread, a few times a second and at the end.
    """
    began = perf_counter()
    plan = plan_load(model, folder)
    chunks = deque(cut_chunks(plan, chunk_bytes))
    device = plan.tensors[0][1].parameter.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # what still runs may own the memory the parameters now have
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in {c.file for c in chunks}}
        handles = {path: file.fileno() for path, file in files.items()}
        _advise(handles.values())
        count = max(1, min(num_threads, len(chunks)))
        lanes = [_Lane(device, chunk_bytes) for _ in range(count)]
        _run(lanes, chunks, handles, progress, plan.num_bytes)
    return LoadReport(plan.num_bytes, perf_counter() - began)


def cut_chunks(plan: LoadPlan, size: int) -> list[Chunk]:
    """The bytes of all tensors as chunks of at most `size` bytes, in file order; no element is cut in two."""
    chunks: list[Chunk] = []
    for stored, place in plan.tensors:
        dtype, flat = DTYPES[stored.dtype], place.target.view(-1)
        item, done = dtype.itemsize, 0
        while done < stored.num_bytes:
            last = chunks[-1] if chunks else None
            at = stored.offset + done
            if last is None or last.file != stored.file or last.offset + last.num_bytes != at or (
                    size - last.num_bytes < item):
                last = Chunk(stored.file, at, 0, [])
                chunks.append(last)
            room = size - last.num_bytes
            taken = min(stored.num_bytes - done, room - room % item)
            target = flat.narrow(0, done // item, taken // item)
            last.pieces.append(Piece(last.num_bytes, taken, target, dtype))
            last.num_bytes += taken
            done += taken
    return chunks


def _advise(handles: Iterable[int]) -> None:
    if hasattr(os, "posix_fadvise"):
        for handle in handles:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _run(lanes: "list[_Lane]", chunks: deque[Chunk], handles: Mapping[Path, int],
         progress: Callable[[int, int], None] | None, total: int) -> None:
    """Let every lane take chunks until there are none; the first error ends all of them."""
    with ThreadPoolExecutor(len(lanes), thread_name_prefix="quire-load") as threads:
        running = {threads.submit(lane.run, chunks, handles) for lane in lanes}
        try:
            while running:
                done, running = wait(running, TICK, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if progress is not None:
                    progress(sum(lane.done for lane in lanes), total)
        finally:
            chunks.clear()


class _Lane:
    """One reading thread: its buffers, its stream, and how many bytes it has handed on."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size, self.done = device, size, 0
        self._on_gpu = device.type == "cuda"
        self._scratch: Tensor | None = None

    def run(self, chunks: deque[Chunk], handles: Mapping[Path, int]) -> None:
        """Read and copy until nothing is left, and wait until the device has it all."""
        buffers = [torch.empty(self.size, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(BUFFERS)]
        if not self._on_gpu:
            self._take(chunks, handles, buffers, [None] * BUFFERS)
            return
        torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            with torch.cuda.stream(stream):
                copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call,unused-ignore]
                self._take(chunks, handles, buffers, copied)
        finally:
            stream.synchronize()  # also after an error: the buffers are about to go

    def _take(self, chunks: deque[Chunk], handles: Mapping[Path, int], buffers: list[Tensor],
              copied: "list[torch.cuda.Event] | list[None]") -> None:
        turn = 0
        while chunks:
            try:
                chunk = chunks.popleft()
            except IndexError:  # another thread was faster
                return
            buffer, event = buffers[turn], copied[turn]
            if event is not None:
                event.synchronize()  # returns at once the first time
            _read(handles[chunk.file], chunk, buffer)
            for piece in chunk.pieces:
                self._copy(piece, buffer.narrow(0, piece.start, piece.num_bytes))
            if event is not None:
                event.record()
            self.done += chunk.num_bytes
            turn = (turn + 1) % BUFFERS

    def _copy(self, piece: Piece, source: Tensor) -> None:
        if piece.dtype == piece.target.dtype:
            piece.target.view(torch.uint8).copy_(source, non_blocking=True)
            return
        if self._scratch is None:
            self._scratch = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        raw = self._scratch.narrow(0, 0, piece.num_bytes)  # starts at an element, which in the file it may not
        raw.copy_(source, non_blocking=True)
        piece.target.copy_(raw.view(piece.dtype))


def _read(handle: int, chunk: Chunk, buffer: Tensor) -> None:
    """Fill the front of `buffer` with a chunk's bytes."""
    view, done = memoryview(buffer.numpy()), 0  # type: ignore[arg-type]
    try:
        while done < chunk.num_bytes:
            count = os.preadv(handle, [view[done : chunk.num_bytes]], chunk.offset + done)
            if not count:
                raise WeightsError(f"{chunk.file} ended at byte {chunk.offset + done} while it was read: download it "
                                   "again.")
            done += count
    except OSError as error:
        raise WeightsError(f"{chunk.file} cannot be read ({error.strerror}): check the disk, or download it again.") \
            from None

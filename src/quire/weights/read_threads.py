"""Threads that read chunks of files into tensors on a device.

    file -- preadv --> pinned buffer -- copy on the thread's own stream --> the unit's raw tensors

Each thread has two buffers: while one is copied to the device, the next chunk is read into the other. A chunk is up to
8 MiB of one file and may fill many tensors, or a piece of one. Bytes of a tensor whose type is the target's go straight
there; others are converted on the device. A CPU has no streams, and a chunk whose pieces all have the types of their
targets is read into the targets without a buffer. Where the loader asks for it, a thread also sums the bytes of its
chunk (`digest.py`), while they are in the CPU's cache.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from types import TracebackType

import torch
from torch import Tensor

from quire.contracts.errors import WeightsError
from quire.weights.digest import Slices, SliceSums
from quire.weights.units import LoadUnit

BUFFERS = 2
MOST_VIEWS = 1024  # of one call of preadv, on Linux and macOS
TICK = 0.1  # seconds that `completed` waits, at most


@dataclass(eq=False)
class OpenUnit:
    """A `LoadUnit` (tensors of a layer or an expert) that is being read.

    tensors  tensors in the checkpoint's layout, to be filled
    missing  bytes that have not arrived in the tensors yet
    lanes    threads that copied parts of the unit
    ready    CUDA event after which a thread may write to the tensors
    slices   slices that are summed in the tensors, when all have arrived
    """

    unit: LoadUnit
    tensors: dict[str, Tensor]
    missing: int
    lanes: "set[_Lane]" = field(default_factory=set)
    ready: torch.cuda.Event | None = None
    slices: Slices = field(default_factory=list)


@dataclass
class Piece:
    """The part of a chunk that goes to one tensor.

    The `count` elements of `dtype` at byte `start` of the chunk are copied to the flat `target`, at element `first`.
    """

    unit: OpenUnit
    start: int
    target: Tensor
    first: int
    count: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece in the file."""
        return self.count * self.dtype.itemsize


@dataclass
class SumSpan:
    """Bytes of a chunk that belong to one slice, whose sums the threads take.

    index      of the slice in `SliceSums`
    start      first byte of the chunk
    position   byte of the slice that is there
    target     address of these bytes in the target, if they are not converted
    """

    index: int
    start: int
    position: int
    target: int
    num_bytes: int = 0


@dataclass
class Chunk:
    """Ranges `runs` (offset, bytes) of a file that are read into one buffer, and the pieces in the buffer.

    spans   bytes that are summed
    """

    file: Path
    runs: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    spans: list[SumSpan] = field(default_factory=list)


class ReadChunker:
    """Cuts reads into chunks of at most `size` bytes and calls `emit` with each chunk; no element is cut in two."""

    def __init__(self, emit: Callable[[Chunk], None], size: int) -> None:
        self._emit, self._size = emit, size
        self._chunk: Chunk | None = None

    def add(
        self,
        unit: OpenUnit,
        file: Path,
        runs: Iterable[tuple[int, int]],
        target: Tensor,
        dtype: torch.dtype,
        *,
        first: int = 0,
        index: int | None = None,
    ) -> None:
        """Plan to read the ranges `runs` (offset, bytes) of `file` into the flat `target`, from element `first` on.

        dtype   of the stored elements
        index   of the slice, if the threads sum its bytes
        """
        item, position = dtype.itemsize, 0
        for offset, length in runs:
            while length:
                chunk = self._chunk
                if chunk is None or chunk.file != file or self._size - chunk.num_bytes < item:
                    self.flush()
                    chunk = self._chunk = Chunk(file)
                if index is not None and (not chunk.spans or chunk.spans[-1].index != index):
                    place = target.data_ptr() + first * target.itemsize
                    chunk.spans.append(SumSpan(index, chunk.num_bytes, position, place))
                room = self._size - chunk.num_bytes
                taken = min(length, room - room % item)
                if index is not None:
                    chunk.spans[-1].num_bytes += taken
                self._append(chunk, offset, Piece(unit, chunk.num_bytes, target, first, taken // item, dtype))
                offset, length, first = offset + taken, length - taken, first + taken // item
                position += taken

    def flush(self) -> None:
        """Call `emit` with the last chunk, which is not full."""
        if self._chunk is not None:
            self._emit(self._chunk)
            self._chunk = None

    @staticmethod
    def _append(chunk: Chunk, offset: int, piece: Piece) -> None:
        """Add a piece at `offset` of the file; adjacent runs are joined, and adjacent pieces of a tensor."""
        size = piece.num_bytes
        if chunk.runs and sum(chunk.runs[-1]) == offset:
            chunk.runs[-1] = chunk.runs[-1][0], chunk.runs[-1][1] + size
        else:
            chunk.runs.append((offset, size))
        last = chunk.pieces[-1] if chunk.pieces else None
        goes_on = last is not None and last.target is piece.target and last.dtype == piece.dtype
        if last is not None and goes_on and last.first + last.count == piece.first:
            last.count += piece.count
        else:
            chunk.pieces.append(piece)
        chunk.num_bytes += size


class Lanes:
    """Threads that read chunks of weight files and copy them to the device. Leaving the context ends the threads.

    num_bytes   bytes that have been copied
    sums        sums of the slices, or None
    """

    def __init__(
        self,
        files: Sequence[Path],
        device: torch.device,
        num_threads: int,
        chunk_bytes: int,
        sums: SliceSums | None = None,
    ) -> None:
        self.device, self.chunk_bytes, self.num_bytes, self.sums = device, chunk_bytes, 0, sums
        self._files, self._stack = files, ExitStack()
        self._handles: dict[Path, int] = {}
        self._chunks: deque[Chunk] = deque()
        self._changed, self._closed = Condition(), False
        self._results: SimpleQueue[OpenUnit | BaseException] = SimpleQueue()
        self._lanes = [_Lane(self) for _ in range(num_threads)]

    def __enter__(self) -> "Lanes":
        try:
            for path in self._files:
                file = self._stack.enter_context(path.open("rb", buffering=0))
                self._handles[path] = file.fileno()
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            self._stack.close()
            raise WeightsError(
                f"{error.filename} cannot be opened ({error.strerror}): check the disk, or download it again."
            ) from None
        for lane in self._lanes:
            lane.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()
        self._stack.close()

    def watch(self, unit: OpenUnit) -> None:
        """Make `completed` yield a unit with nothing to read. Call this for every unit, after its reads are planned."""
        if not unit.missing:
            self._results.put(unit)

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk for the threads to read."""
        if self.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
            ready.record(torch.cuda.current_stream(self.device))
            for piece in chunk.pieces:
                piece.unit.ready = piece.unit.ready or ready
        with self._changed:
            self._chunks.append(chunk)
            self._changed.notify()

    def completed(self) -> Iterable[OpenUnit]:
        """Yield the units whose bytes have all arrived. The device's current stream waits for the copies of each.

        Waits up to TICK seconds for the first unit. Raises the error of a thread that failed.
        """
        try:
            found = self._results.get(timeout=TICK)
        except Empty:
            return
        while True:
            if isinstance(found, BaseException):
                raise found
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                for lane in found.lanes:
                    lane.join_stream(stream)
            yield found
            if self._results.empty():
                return
            found = self._results.get()

    def next_chunk(self) -> Chunk | None:
        """Wait for a queued chunk and return it; None when the context has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._closed)
            return self._chunks.popleft() if self._chunks else None

    def arrived(self, chunk: Chunk, lane: "_Lane") -> None:
        """Count the bytes of a copied chunk. `completed` then yields the units whose last bytes were in it."""
        with self._changed:
            self.num_bytes += chunk.num_bytes
            for piece in chunk.pieces:
                piece.unit.lanes.add(lane)
                piece.unit.missing -= piece.num_bytes
                if not piece.unit.missing:
                    self._results.put(piece.unit)

    def add_sums(self, chunk: Chunk, buffer: int | None) -> None:
        """Sum the spans of a chunk that was read. buffer: its address; None: it was read into the targets."""
        for span in chunk.spans:
            assert self.sums is not None, "only slices that are summed have spans"
            address = span.target if buffer is None else buffer + span.start
            self.sums.add(span.index, address, span.num_bytes, span.position)

    def failed(self, error: BaseException) -> None:
        """Make `completed` raise the error of a thread."""
        self._results.put(error)

    def read(self, chunk: Chunk, *views: memoryview) -> None:
        """Read the file ranges of a chunk into `views`, which are filled in order."""
        handle, room = self._handles[chunk.file], deque(views)
        try:
            for offset, length in chunk.runs:
                end = offset + length
                while offset < end:
                    count = os.preadv(handle, _front(room, end - offset), offset)
                    if not count:
                        raise WeightsError(f"{chunk.file} ended at byte {offset} while it was read: download it again.")
                    _advance(room, count)
                    offset += count
        except OSError as error:
            raise WeightsError(
                f"{chunk.file} cannot be read ({error.strerror}): check the disk, or download it again."
            ) from None


def _targets(chunk: Chunk) -> Iterator[memoryview]:
    """Yield the memory in which each piece belongs, on a CPU."""
    whole: dict[int, memoryview] = {}  # by tensor: there are many more pieces than tensors
    for piece in chunk.pieces:
        if id(piece.target) not in whole:
            whole[id(piece.target)] = memoryview(piece.target.view(torch.uint8).numpy())  # type: ignore[arg-type]
        first = piece.first * piece.dtype.itemsize
        yield whole[id(piece.target)][first : first + piece.num_bytes]


def _front(room: deque[memoryview], size: int) -> list[memoryview]:
    """Return views of the first `size` bytes, at most as many views as a system call takes."""
    found = list[memoryview]()
    for view in islice(room, MOST_VIEWS):
        found.append(view[:size])
        size -= len(found[-1])
        if not size:
            break
    return found


def _advance(room: deque[memoryview], size: int) -> None:
    """Drop the first `size` bytes of the views."""
    while room and size >= len(room[0]):
        size -= len(room.popleft())
    if size:
        room[0] = room[0][size:]


class _Lane(Thread):
    """A reading thread with its buffers and its stream."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(name="quire-load", daemon=True)
        self._lanes, self._device = lanes, lanes.device
        self._on_gpu = lanes.device.type == "cuda"
        self._copied: list[torch.cuda.Event] = []
        self._scratch: Tensor | None = None

    def run(self) -> None:
        """Read and copy chunks until none is left, then wait until the device has finished the copies."""
        try:
            size = self._lanes.chunk_bytes
            buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(BUFFERS)]
            if not self._on_gpu:
                self._take(buffers)
                return
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call,unused-ignore]
            try:
                with torch.cuda.stream(stream):
                    self._copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call,unused-ignore]
                    self._take(buffers)
            finally:
                stream.synchronize()  # also after an error: the buffers are about to go
        except BaseException as error:
            self._lanes.failed(error)

    def join_stream(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for everything that this thread has copied."""
        for event in self._copied:
            stream.wait_event(event)

    @torch.no_grad()
    def _take(self, buffers: list[Tensor]) -> None:
        turn = 0
        while (chunk := self._lanes.next_chunk()) is not None:
            if self._on_gpu:
                self._copied[turn].synchronize()  # returns at once the first time
            self._fill(chunk, buffers[turn])
            if self._on_gpu:
                self._copied[turn].record()
            self._lanes.arrived(chunk, self)
            del chunk  # its tensors may be packed and freed while this thread waits for the next
            turn = (turn + 1) % BUFFERS

    def _fill(self, chunk: Chunk, buffer: Tensor) -> None:
        if not self._on_gpu and all(piece.dtype == piece.target.dtype for piece in chunk.pieces):
            self._lanes.read(chunk, *_targets(chunk))
            self._lanes.add_sums(chunk, None)
            return
        self._lanes.read(chunk, memoryview(buffer.numpy()))  # type: ignore[arg-type]
        waited: set[int] = set()
        for piece in chunk.pieces:
            if piece.unit.ready is not None and id(piece.unit.ready) not in waited:
                waited.add(id(piece.unit.ready))
                torch.cuda.current_stream(self._device).wait_event(piece.unit.ready)
            self._copy(piece, buffer.narrow(0, piece.start, piece.num_bytes))
        self._lanes.add_sums(chunk, buffer.data_ptr())

    def _copy(self, piece: Piece, source: Tensor) -> None:
        target = piece.target.narrow(0, piece.first, piece.count)
        if piece.dtype == target.dtype:
            target.view(torch.uint8).copy_(source, non_blocking=True)
            return
        if self._scratch is None:
            self._scratch = torch.empty(self._lanes.chunk_bytes, dtype=torch.uint8, device=self._device)
        raw = self._scratch.narrow(0, 0, piece.num_bytes)  # starts at an element, which in the file it may not
        raw.copy_(source, non_blocking=True)
        target.copy_(raw.view(piece.dtype))

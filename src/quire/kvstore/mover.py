"""Copy jobs of a rank: runs those of each step, and reports those that have ended.

    device <-> host   `kernels/page_copies.py`: at once on a CPU, on streams beside the steps on a GPU
    host <-> disk     `files.py`, in threads of each direction
    peers -> host     a `PageSource`, in a thread
    peers -> device   a `DeviceSource`, in a thread

The host arena has the layout of the device's arena: a page is one copy, in every direction. Jobs begin in the thread
that launches steps; another one may ask for their ends. Knows nothing of requests, pools and leases (`kv/`).
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import torch

from quire.contracts.errors import ConfigError
from quire.contracts.step import CopyJob, DroppedFiles, FinishedCopy, Tier
from quire.kernels.native import memory
from quire.kernels.page_copies import InlineCopies, PageCopies, StreamCopies, pin
from quire.kvstore.disk_tier import FileNames
from quire.kvstore.file_threads import HANG_SECONDS, FileThreads, Lost
from quire.kvstore.files import BlockFiles
from quire.kvstore.shards import Shard

LOG = logging.getLogger("quire")
MOMENT_SECONDS = 0.005  # a step without tokens waits at most this long for a job
TICK_SECONDS = 0.0002
TOKEN_BYTES = 32
THREADS = {
    "read": 8,
    "write": 1,
    "peer": 4,
    "ipc": 4,
}  # one reads and checks about 2.3 GB/s of cached files

Outcome = Callable[[], Lost | None]  # returns indices of blocks that failed; None: the job still runs
Move = Callable[[CopyJob, Sequence[int]], Lost]  # moves some blocks of a job; returns those that failed


class PageSource(Protocol):
    """Blocks of other engines."""

    def fetch(self, keys: Sequence[bytes], sources: Sequence[int], pages: Sequence[memoryview]) -> tuple[int, ...]:
        """Read blocks into `pages`; return the indices of those that failed. Any time, but an end of it.

        sources   see `CopyJob`
        """


class PagedMemory(Protocol):
    """Memory of a device in pages: its KV cache (`KVArena`), or its checkpoints of states.

    pages   [num_pages, page_bytes] uint8; page 0 is not copied
    """

    @property
    def pages(self) -> torch.Tensor:
        """The pages."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""


class DeviceSource(Protocol):
    """Blocks on devices of other engines."""

    def begin(self) -> Move:
        """Return a function that copies blocks of a job into the device's pages, when the device has done what it has
        been given so far. Any time, but an end of it."""


@dataclass(frozen=True)
class _Running:
    job: CopyJob
    outcome: Outcome
    began: float


class BlockMover:
    """Runs the copy jobs of a rank between its device, host memory and files.

    peers   blocks of other engines, or None;  devices  of their GPUs
    host    [num_host_blocks + 1, page_bytes] uint8, the host tier; page 0 has the token of a shard that is shared
    shards  this rank's part of each block, if other engines may read it in the host tier; (): they may not
    """

    def __init__(
        self,
        arena: PagedMemory,
        num_host_blocks: int,
        files: BlockFiles | None = None,
        peers: PageSource | None = None,
        *,
        devices: DeviceSource | None = None,
        shared: Shard | None = None,
        names: FileNames | None = None,
    ) -> None:
        """Allocate the host tier.

        shared   this rank's part of each block, to put the host tier into memory that other processes can open
        names    of the rank's files, of which the core hears; None: the core reads the folder itself
        """
        self._names = names
        self._arena, self._files, self._peers, self._devices = arena, files, peers, devices
        self.shards: tuple[Shard, ...] = ()
        size = (num_host_blocks + 1, arena.page_bytes)
        try:
            if shared is None:
                self.host = memory.empty(size, torch.uint8, torch.device("cpu"))
            else:
                self.host, file = memory.shared(size, torch.uint8)
                self.shards = (msgspec.structs.replace(shared, file=file, token=secrets.token_bytes(TOKEN_BYTES)),)
                self.page(0)[:TOKEN_BYTES] = self.shards[0].token
        except RuntimeError as error:
            raise ConfigError(
                f"kv_offload_gb: {size[0] * size[1] / 2**30:.1f} GiB of host memory cannot be had ({error}): lower it."
            ) from error
        on_gpu = arena.pages.device.type == "cuda"
        if on_gpu:
            pin(self.host, arena.pages.device)
        self._pages: PageCopies = (StreamCopies if on_gpu else InlineCopies)(arena.pages, self.host)
        ways = ("read", "write") * (files is not None) + ("peer", "ipc") * (peers is not None)
        self._threads = {way: FileThreads(f"quire-kv-{way}", THREADS[way]) for way in ways}
        self._running: list[_Running] = []
        self._lock = threading.Lock()

    def page(self, block: int) -> memoryview:
        """Return the memory of a host block."""
        return memoryview(self.host[block].numpy())

    def begin(self, jobs: Iterable[CopyJob]) -> None:
        """Begin jobs, after all work that the device has been given so far. Does not wait for a disk or a GPU."""
        for job in jobs:
            began = time.perf_counter()
            outcome = self._begin(job)
            with self._lock:
                self._running.append(_Running(job, outcome, began))

    def finished(self, *, wait: bool = False) -> tuple[FinishedCopy, ...]:
        """Return the reports of jobs that have ended since the last call. `wait`: for one of them, a moment at most."""
        until = time.perf_counter() + MOMENT_SECONDS
        while not (reports := self._ended()) and wait and self._running and time.perf_counter() < until:
            time.sleep(TICK_SECONDS)
        return reports

    def take_news(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]] | None:
        """Return the keys of blocks whose files came, and of those that went, since the last call, for the core.

        None: the core reads the folder itself, or there is none.
        """
        return None if self._names is None else self._names.take_news()

    def drop(self, dropped: DroppedFiles) -> None:
        """Delete files, if the core has no part in it. Does not wait."""
        if self._names is not None:
            self._names.clear() if dropped.every else self._names.discard(dropped.keys)

    def close(self) -> None:
        """Wait until files are deleted, some seconds at most."""
        if self._names is not None:
            self._names.close()

    def _begin(self, job: CopyJob) -> Outcome:
        if job.source == Tier.PEER:
            assert self._peers is not None, "there is no peer tier"
            return self._in_threads("peer", job, self._move_pages, whole=True)
        if job.source == Tier.CUDA_IPC:
            assert self._devices is not None, "there is no tier of GPUs"
            return self._in_threads("ipc", job, self._devices.begin(), whole=True)
        if Tier.DISK in (job.source, job.target):
            assert self._files is not None, "there is no disk tier"
            reads = job.source == Tier.DISK
            return self._in_threads("read" if reads else "write", job, self._move_files)
        ended = self._pages.copy(job.sources.tolist(), job.targets.tolist(), to_host=job.target == Tier.HOST)
        return lambda: () if ended() else None

    def _in_threads(self, way: str, job: CopyJob, move: Move, *, whole: bool = False) -> Outcome:
        """Give the blocks of a job, one by one, to the threads of a way. `whole`: one thread gets all of them."""
        count, threads = len(job.keys), self._threads[way]
        parts = [range(count)] if whole else [range(i, i + 1) for i in range(count)]
        moves = [(part, threads.submit(partial(_tried, move, job, part))) for part in parts]
        return _Pieces(threads, moves, patient=whole)

    def _move_pages(self, job: CopyJob, part: Sequence[int]) -> tuple[int, ...]:
        assert self._peers is not None and len(part) == len(job.keys)
        return self._peers.fetch(job.keys, job.sources.tolist(), [self.page(block) for block in job.targets.tolist()])

    def _move_files(self, job: CopyJob, part: Sequence[int]) -> tuple[int, ...]:
        assert self._files is not None
        reads = job.source == Tier.DISK
        move, blocks = (self._files.read, job.targets) if reads else (self._files.write, job.sources)
        return tuple(i for i in part if not move(job.keys[i], self.page(int(blocks[i]))))

    def _error(self, one: _Running) -> str:
        """Return the reason why the disk gave or took no blocks of a job; "" for another tier, and if it did."""
        if isinstance(one.outcome, _Pieces) and one.outcome.given_up:
            return f"it has not answered for {HANG_SECONDS:.0f} s"
        return self._files.full if self._files is not None and one.job.target == Tier.DISK else ""

    def _ended(self) -> tuple[FinishedCopy, ...]:
        with self._lock:
            found = [(one, one.outcome()) for one in self._running]
            self._running = [one for one, failed in found if failed is None]
        now = time.perf_counter()
        for one, failed in found:
            if self._names is not None and failed is not None and one.job.target == Tier.DISK:
                self._names.note_written(key for i, key in enumerate(one.job.keys) if i not in failed)
        return tuple(
            FinishedCopy(
                id=one.job.id,
                failed=failed,
                seconds=now - one.began,
                num_bytes=(len(one.job.keys) - len(failed)) * self._arena.page_bytes,
                error=self._error(one),
            )
            for one, failed in found
            if failed is not None
        )


def _tried(move: Move, job: CopyJob, part: Sequence[int]) -> tuple[int, ...]:
    """Move blocks of a job in a thread; return those that failed. A fault of one job must not end the engine."""
    try:
        return move(job, part)
    except Exception:
        LOG.exception("a copy of KV blocks from the %s tier to the %s tier failed", job.source, job.target)
        return tuple(part)


class _Pieces:
    """Pieces of a job, in the queue of threads. A call is an `Outcome`.

    given_up   True: some pieces were not begun, because all threads hang
    """

    def __init__(
        self, threads: FileThreads, moves: Sequence[tuple[Sequence[int], "Future[Lost]"]], patient: bool
    ) -> None:
        """patient: pieces are waited for, even while all threads hang."""
        self._threads, self._moves, self._patient = threads, moves, patient
        self.given_up = False

    def __call__(self) -> Lost | None:
        if not self._patient and self._threads.hang():
            self.given_up |= any([move.cancel() for _, move in self._moves if not move.cancelled()])
        if not all(move.done() for _, move in self._moves):
            return None
        return tuple(sorted(i for part, move in self._moves for i in (part if move.cancelled() else move.result())))

"""Copy jobs of a rank: runs those of each step, and reports those that have ended.

    device <-> host   `page_copies.py`: at once on a CPU, on streams beside the steps on a GPU
    host <-> disk     `files.py`, in two threads, one per direction

The host arena has the layout of the device's arena: a page is one copy, in every direction. Jobs begin in the thread
that launches steps; another one may ask for their ends. Knows nothing of requests, pools and leases (`kv/`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from quire.contracts.errors import ConfigError
from quire.contracts.step import CopyJob, FinishedCopy, Tier
from quire.kernels.native import memory
from quire.kvstore.arena import KVArena
from quire.kvstore.files import BlockFiles, FileThread
from quire.kvstore.page_copies import InlineCopies, PageCopies, StreamCopies, pin

LOG = logging.getLogger("quire")
MOMENT_SECONDS = 0.005  # a step without tokens waits at most this long for a job
TICK_SECONDS = 0.0002

Outcome = Callable[[], tuple[int, ...] | None]  # returns indices of blocks that failed; None: the job still runs


@dataclass(frozen=True)
class _Running:
    job: CopyJob
    outcome: Outcome
    began: float


class BlockMover:
    """Runs the copy jobs of a rank between its device, host memory and files.

    host    [num_host_blocks + 1, page_bytes] uint8, the host tier; page 0 is not used
    """

    def __init__(self, arena: KVArena, num_host_blocks: int, files: BlockFiles | None = None,
                 copies: Callable[[torch.Tensor, torch.Tensor], PageCopies] | None = None) -> None:  # fmt: skip
        """Allocate the host tier. `copies`: makes the copies between device and host; None: those of the device."""
        self._arena, self._files = arena, files
        size = (num_host_blocks + 1, arena.page_bytes)
        try:
            self.host = memory.empty(size, torch.uint8, torch.device("cpu"))
        except RuntimeError as error:
            raise ConfigError(f"kv_offload_gb: {size[0] * size[1] / 2**30:.1f} GiB of host memory cannot be had "
                              f"({error}): lower it.") from error  # fmt: skip
        on_gpu = arena.pages.device.type == "cuda"
        if on_gpu:
            pin(self.host, arena.pages.device)
        self._pages = (copies or (StreamCopies if on_gpu else InlineCopies))(arena.pages, self.host)
        self._threads = {way: FileThread(f"quire-kv-{way}") for way in ("read", "write")} if files else {}
        self._running: list[_Running] = []
        self._lock = threading.Lock()

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

    def _begin(self, job: CopyJob) -> Outcome:
        if Tier.DISK in (job.source, job.target):
            assert self._files is not None, "there is no disk tier"
            reads = job.source == Tier.DISK
            work = partial(self._move_files, job, self._files.read if reads else self._files.write)
            return partial(_of_thread, self._threads["read" if reads else "write"].submit(work))
        ended = self._pages.copy(job.sources.tolist(), job.targets.tolist(), to_host=job.target == Tier.HOST)
        return lambda: () if ended() else None

    def _move_files(self, job: CopyJob, move: Callable[[bytes, memoryview], bool]) -> tuple[int, ...]:
        blocks = job.targets if job.source == Tier.DISK else job.sources
        pages = (memoryview(self.host[block].numpy()) for block in blocks.tolist())
        try:
            return tuple(i for i, (key, page) in enumerate(zip(job.keys, pages, strict=True)) if not move(key, page))
        except Exception:  # a fault of one job must not end the engine
            LOG.exception("a copy of KV blocks from or to a disk failed")
            return tuple(range(len(job.keys)))

    def _ended(self) -> tuple[FinishedCopy, ...]:
        with self._lock:
            found = [(one, one.outcome()) for one in self._running]
            self._running = [one for one, failed in found if failed is None]
        now = time.perf_counter()
        return tuple(
            FinishedCopy(id=one.job.id, failed=failed, seconds=now - one.began,
                         num_bytes=(len(one.job.keys) - len(failed)) * self._arena.page_bytes,
                         error=self._files.full if self._files and one.job.target == Tier.DISK else "")
            for one, failed in found if failed is not None
        )  # fmt: skip


def _of_thread(future: "Future[tuple[int, ...]]") -> tuple[int, ...] | None:
    return future.result() if future.done() else None

"""Metrics of a server with several HTTP processes: each writes its counts to a file, and any of them adds all up.

Counts of requests are those of a process. Counts of steps are made by the first process alone. The state of the engine
is known to all. While there is no engine, each process knows the requests that it holds. The file of a process that has
ended stays, so that no counter goes back. The next process of the same number goes on with it.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from quire.observe.metrics import Metrics
from quire.observe.series import Histogram, Tally

LOG = logging.getLogger("quire")
INTERVAL = 1.0  # seconds between two writes
TALLIES = (
    *("_finished", "_aborts", "_rejections", "_http"),
    *("key_requests", "key_tokens", "key_refusals", "trace_spans", "restarts", "reloads", "dropped"),
)
NUMBERS = ("_num_steps", "_generated", "_delivered")


class Counts(msgspec.Struct):
    """All that a process has counted. `seen`, `parts`: buckets and sum of each histogram, by name.
    `held`: requests of process `number` that wait for the next core, a gauge"""

    number: int
    held: int
    numbers: list[int]
    phases: dict[str, int]
    seen: dict[str, tuple[list[int], float]]
    parts: dict[str, tuple[list[int], float]]
    tallies: list[list[tuple[list[str], float]]]
    pids: dict[str, int]


DECODER = msgspec.msgpack.Decoder(Counts)


class SharedMetrics(Metrics):
    """Metrics of HTTP process `number` of `count`. While `share` runs, `render` returns those of the whole server.
    `again`: number of processes that had this number before."""

    def __init__(
        self, prefix: str = "quire", model_name: str = "", *, number: int = 0, count: int = 1, again: int = 0
    ) -> None:
        super().__init__(prefix, model_name)
        self._number, self._count = number, count
        self._file, self._follows = f"counts{number}", again > 0
        self._folder: Path | None = None
        self._failed = False  # the last write
        if number:
            self._pids = {f"http_{number}": os.getpid()}

    async def share(self, folder: Path) -> None:
        """Write the counts to a folder that all processes use, again and again, and a last time when cancelled."""
        if self._count == 1:
            return
        self._folder = folder
        try:
            while True:
                self._publish(folder)
                await asyncio.sleep(INTERVAL)
        finally:
            self._publish(folder)

    def _publish(self, folder: Path) -> None:
        """Write the counts. A fault is logged when it is the first in a row; the next write may succeed."""
        new = folder / f"{self._file}.new"
        try:
            if folder.is_dir():  # the first process, which ends last, has not deleted it
                new.write_bytes(msgspec.msgpack.encode(self._told(folder / self._file)))
                new.replace(folder / self._file)
            self._failed = False
        except OSError as fault:
            if not self._failed:
                LOG.warning(
                    "the counts of HTTP process %d for /metrics could not be written to %s: %s. Other "
                    "processes show its last ones until a write succeeds: make room there.",
                    self._number,
                    folder,
                    fault.strerror or fault,
                )
            self._failed = True

    def _num_held(self) -> int:
        """Return how many requests of all processes wait for the next core."""
        own = super()._num_held()
        if self._held is None:
            return own
        others = {counts.number: counts.held for counts in self._others()}
        return own + sum(held for number, held in others.items() if number != self._number)

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of a scrape: those of all processes, added up."""
        if self._count == 1:
            return super().render()
        if self._folder is not None:
            self._publish(self._folder)  # the next scrape may be another process's, and no counter may fall
        whole = SharedMetrics(self._prefix, self._labels["model_name"], number=self._number)
        whole._registry = CollectorRegistry(auto_describe=False)  # without the numbers of one process of several
        whole._registry.register(whole)
        whole._stats, whole._adapters = self._stats, self._adapters
        whole._num_slots, whole._num_blocks, whole._cache_info = self._num_slots, self._num_blocks, self._cache_info
        whole._busy_since, whole.is_ready, whole.certificate_end = self._busy_since, self.is_ready, self.certificate_end
        whole._held = None if self._held is None else self._num_held
        whole._seen = {name: Histogram(one.bounds) for name, one in self._seen.items()}
        for counts in (*self._others(), self._counts()):  # the process ids of those that live come last
            whole._add(counts)
        return super(SharedMetrics, whole).render()

    def _told(self, file: Path) -> Counts:
        """Return the counts for the others: once this process is ready, with those that the one before has left."""
        if self._follows and file.exists():
            before, pids = DECODER.decode(file.read_bytes()), self._pids
            if not self._num_slots:  # the buckets of lengths are not known yet
                return msgspec.structs.replace(before, held=super()._num_held())
            self._add(before)
            self._pids = before.pids | pids
        self._follows = False
        return self._counts()

    def _counts(self) -> Counts:
        return Counts(
            number=self._number,
            held=super()._num_held(),
            numbers=[getattr(self, name) for name in NUMBERS],
            phases=self._phase_tokens,
            seen={name: (one.counts, one.total) for name, one in self._seen.items()},
            parts={name: (one.counts, one.total) for name, one in self._parts.items()},
            tallies=[[(list(labels), count) for labels, count in self._tally(name).counts.items()] for name in TALLIES],
            pids=self._pids,
        )

    def _others(self) -> Iterator[Counts]:
        """Yield the counts that the other processes have written last."""
        for path in sorted(self._folder.glob("counts*[0-9]")) if self._folder is not None else ():
            if path.name != self._file:
                yield DECODER.decode(path.read_bytes())

    def _add(self, counts: Counts) -> None:
        for name, number in zip(NUMBERS, counts.numbers, strict=True):
            setattr(self, name, getattr(self, name) + number)
        for phase, number in counts.phases.items():
            self._phase_tokens[phase] += number
        for own, given in ((self._seen, counts.seen), (self._parts, counts.parts)):
            for name, (buckets, total) in given.items():
                own[name].add(buckets, total)
        for name, entries in zip(TALLIES, counts.tallies, strict=True):
            for labels, added in entries:
                self._tally(name).add(*labels, count=added)
        self._pids |= counts.pids

    def _tally(self, name: str) -> Tally:
        tally: Tally = getattr(self, name)
        return tally

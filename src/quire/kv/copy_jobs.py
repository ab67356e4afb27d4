"""Copy jobs under way: numbered, found by key, and void where a key was dropped before the report.

Knows jobs, keys and links between tiers. Knows nothing of pools and references, which `store.py` holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.contracts.step import CopyJob, FinishedCopy, StepCopies, Tier

Link = tuple[Tier, Tier]  # source, target
STORE, LOAD = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)


def link_from(tier: Tier) -> Link:
    """Return the link by which blocks of a tier come nearer to the device."""
    return tier, Tier.DEVICE if tier in (Tier.HOST, Tier.CUDA_IPC) else Tier.HOST


@dataclass
class RunningJob:
    """A job between its planning and its report. `void`: indices of blocks whose keys were dropped meanwhile."""

    job: CopyJob
    void: set[int] = field(default_factory=set)

    @property
    def link(self) -> Link:
        """Source and target of the job."""
        return self.job.source, self.job.target


class CopyJobs:
    """The jobs of an engine core that are planned or run.

    running   number of a job -> the job
    """

    def __init__(self, links: Iterable[Link], numbers: Iterator[int], *, states: bool = False) -> None:
        """numbers: gives the numbers of jobs;  states: the jobs copy checkpoints."""
        self.running: dict[int, RunningJob] = {}
        self._numbers, self._states = numbers, states
        self._moving: dict[Link, dict[bytes, tuple[int, int]]] = {link: {} for link in links}  # key -> job, its index
        self._before: list[CopyJob] = []
        self._after: list[CopyJob] = []

    def find(self, link: Link, key: bytes) -> int | None:
        """Return the job that moves a block over a link; None when no job does, or its copy is void."""
        found = self._moving[link].get(key)
        return None if found is None else found[0]

    def num_moving(self, link: Link) -> int:
        """Return the number of blocks that move over a link."""
        return len(self._moving[link])

    def begin(
        self,
        link: Link,
        keys: Sequence[bytes],
        *,
        sources: Sequence[int] = (),
        targets: Sequence[int] = (),
        after: bool,
    ) -> int:
        """Plan a job and return its number. `after`: see `StepCopies`."""
        job = CopyJob(
            id=next(self._numbers),
            source=link[0],
            target=link[1],
            keys=tuple(keys),
            sources=np.array(sources, np.int32),
            targets=np.array(targets, np.int32),
            states=self._states,
        )
        self.running[job.id] = RunningJob(job)
        self._moving[link].update({key: (job.id, index) for index, key in enumerate(keys)})
        (self._after if after else self._before).append(job)
        return job.id

    def take(self) -> StepCopies | None:
        """Return the jobs that were planned since the last call; None: there are none."""
        if not self._before and not self._after:
            return None
        copies = StepCopies(before=tuple(self._before), after=tuple(self._after))
        self._before, self._after = [], []
        return copies

    def end(self, report: FinishedCopy) -> RunningJob:
        """Forget a job that has ended, and return it."""
        running = self.running.pop(report.id)
        moving = self._moving[running.link]
        for key in running.job.keys:
            if key in moving and moving[key][0] == report.id:
                del moving[key]
        return running

    def void(self, key: bytes, links: Iterable[Link] | None = None) -> None:
        """Make the copies of a block over these links (None: all) worthless.

        It does not move to the device or the host tier any more, so another job can bring it. A write to a tier below
        goes on: its block is discarded at the end.
        """
        for link in self._moving if links is None else links:
            moving = self._moving[link]
            if (found := moving.get(key)) is not None:
                self.running[found[0]].void.add(found[1])
                if link[1] in (Tier.DEVICE, Tier.HOST):
                    del moving[key]

    def void_all(self) -> None:
        """Make every copy worthless."""
        for keys in [running.job.keys for running in self.running.values()]:
            for key in keys:
                self.void(key)

    def blocks(self, tier: Tier) -> list[int]:
        """Return the blocks of a tier that jobs read or write, once per job."""
        found: list[int] = []
        for running in self.running.values():
            job = running.job
            found += job.sources.tolist() if job.source == tier else []
            found += job.targets.tolist() if job.target == tier else []
        return found

    def check(self) -> None:
        """Assert that every moving key is in its job, and every planned job is known."""
        assert {job.id for job in self._before + self._after} <= self.running.keys(), "a planned job is unknown"
        for link, moving in self._moving.items():
            for key, (number, index) in moving.items():
                running = self.running[number]
                assert running.link == link and running.job.keys[index] == key, "a key moves in no job"

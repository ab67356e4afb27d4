"""A rank's model on its device: the part of the assembly for one device that is each rank's part of one for many."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.assemble.cpu import load_without_triton
from quire.assemble.parts import Loaded, Loading, Parts
from quire.config.resolve import MemoryPlan
from quire.contracts.errors import ConfigError
from quire.contracts.step import I32, StepPlan, StepResult
from quire.distributed import Group
from quire.distributed.checked import CheckedGroup
from quire.distributed.mesh import RankGroups
from quire.distributed.process_group import join_ranks
from quire.models.plan import EnginePlan
from quire.platforms.cpu import read_cpu_facts
from quire.platforms.cuda import CudaFacts
from quire.worker.spans import StepTrace


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a rank's process: its plan, the file where the ranks meet, and the threads that it may use."""

    plan: EnginePlan
    meeting: str
    threads: int


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a rank that can run steps; see `Parts`."""

    depth: int
    prompt_chunk: int = 0
    plans: dict[str, str] = {}
    notes: tuple[str, ...] = ()


def load_rank(plan: EnginePlan, groups: RankGroups, gpu: CudaFacts | None, *, on_loading: Loading,
              end_phase: Callable[[str], None]) -> Loaded:  # fmt: skip
    """Load the model of a rank's plan on its device; raises a `UserError` that names the fix.

    groups       the groups of this rank;  gpu   facts about its GPU, None on a CPU
    end_phase    called with the name of each start-up phase when it ends
    """
    if gpu is not None:
        from quire.assemble.cuda import load_cuda

        return load_cuda(plan, groups, gpu, on_loading=on_loading, end_phase=end_phase)
    return load_without_triton(plan, groups, on_loading=on_loading, end_phase=end_phase,
                               free_bytes=lambda: read_cpu_facts().free_memory)  # fmt: skip


def build_rank(start: bytes, on_loading: Loading) -> "ChildRank":
    """Join the other ranks and load the model, in the process of a rank. `start`: a `RankTask` as JSON."""
    task = msgspec.json.decode(start, type=RankTask)
    torch.set_num_threads(task.threads)
    device, mesh = torch.device(task.plan.machine.device), task.plan.mesh
    groups = join_ranks(Path(task.meeting), mesh.rank.number, mesh.parallel, device)
    if task.plan.config.parallel.check_collectives:
        groups = checked(groups, device)
    loaded = load_rank(task.plan, groups, None, on_loading=on_loading, end_phase=lambda name: None)
    return ChildRank(loaded, groups)


def checked(groups: RankGroups, device: torch.device) -> RankGroups:
    """Return groups that compare each exchange over the ranks."""

    def one(group: Group | None) -> Group | None:
        return None if group is None else CheckedGroup(group, device)

    return RankGroups(tp=one(groups.tp), pp=one(groups.pp), tokens=one(groups.tokens))


@dataclass(frozen=True)
class ChildRank:
    """A rank in its process, with its weights; see `quire.procs.rank_server.LoadedRank`."""

    loaded: Loaded
    groups: RankGroups

    @property
    def payload(self) -> bytes:
        """The memory of the device, as JSON."""
        return msgspec.json.encode(self.loaded.measure())

    def size(self, payload: bytes) -> "ChildRunner":
        """Build the rest with a `MemoryPlan` as JSON."""
        return ChildRunner(self.loaded.finish(msgspec.json.decode(payload, type=MemoryPlan)), self.groups)


class ChildRunner:
    """A rank in its process that runs steps; see `quire.procs.rank_server.RunningRank`."""

    def __init__(self, parts: Parts, groups: RankGroups) -> None:
        assert parts.worker is not None
        self._parts, self._runner, self._trace = parts, parts.worker, StepTrace(parts.worker, groups)

    @property
    def payload(self) -> bytes:
        """`RankFacts` as JSON."""
        parts = self._parts
        return msgspec.json.encode(RankFacts(
            depth=parts.depth, prompt_chunk=parts.prompt_chunk, notes=parts.notes,
            plans={name: str(plan) for name, plan in parts.plans.items()}))  # fmt: skip

    def submit(self, plan: StepPlan) -> None:
        """Launch a step."""
        self._runner.submit(plan)

    def release(self, masks: I32) -> None:
        """Launch the sampling of the last step with its grammar masks."""
        self._runner.release(masks)

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""
        return self._runner.collect()

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Run a named operation; see `Executor.control`."""
        controls: dict[str, Callable[..., object]] = {"describe": self._runner.describe, "trace": self._trace.control}
        if name not in controls:
            raise ConfigError(f"unknown control {name!r}: there is {', '.join(controls)}.")
        return controls[name](**args)

    def close(self) -> None:
        """Free nothing: the process ends."""

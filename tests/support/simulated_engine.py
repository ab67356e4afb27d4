"""An engine of many ranks in one process: each rank is a thread with its own model, runner and KV cache.

The core, the plans and the runners are those of an engine of processes; only the transport is not.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.answers.grammar import GrammarCompiler
from quire.answers.grammar_trial import GrammarTrial
from quire.assemble.engine import Found, assemble_core, join_replicas, plan_ranks, read_files
from quire.assemble.loaded import Outside, Parts
from quire.assemble.rank import load_rank
from quire.config.engine import EngineConfig
from quire.contracts.parallel import dcp_members, ep_members, mover_members, pp_members, tp_members
from quire.contracts.protocols import ExecutorFacts, Wait
from quire.contracts.step import I32, StepPlan, StepResult
from quire.distributed.checked_group import CheckedGroup
from quire.distributed.mesh import RankGroups
from quire.engine.core import EngineCore
from quire.engine.replicas import Core
from quire.plan.engine import EnginePlan
from quire.plan.meetings import check
from quire.plan.memory import shared_sizes
from quire.plan.sizing import resolve_sizing
from quire.text.tokenizer import Tokenizer
from quire.worker.balancing import RankBalancing

from .features import feature
from .simulated_groups import SimulatedRanks

R = TypeVar("R")


class SimulatedExecutor:
    """Runs every plan on all ranks; see `Executor`. The last rank's stage answers."""

    def __init__(self, parts: list[Parts], facts: ExecutorFacts, lead: int) -> None:
        self.parts, self._facts, self._lead = parts, facts, lead
        self._threads = [ThreadPoolExecutor(1) for _ in parts]
        self._steps: deque[list[Future[StepResult]]] = deque()
        self._waiting: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        if len(plan.grammar):
            self._waiting = plan
        else:
            self._start(plan, None)

    def release(self, step: int, masks: I32) -> None:
        if self._waiting is not None:
            plan, self._waiting = self._waiting, None
            self._start(plan, masks)

    def _start(self, plan: StepPlan, masks: I32 | None) -> None:
        def run(part: Parts) -> StepResult:
            assert part.worker is not None
            return part.worker.run(plan) if masks is None else part.worker.run(plan, lambda: masks)

        self._steps.append([pool.submit(run, part) for pool, part in zip(self._threads, self.parts, strict=True)])

    def collect(self) -> StepResult:
        return [future.result(timeout=60) for future in self._steps.popleft()][self._lead]

    def ready(self) -> bool:
        return True

    def check_alive(self) -> None:
        pass

    def ask(self, name: str, args: dict[str, Any]) -> Wait:
        return lambda seconds: self.control(name, args)

    def control(self, name: str, args: dict[str, Any]) -> object:
        assert name == "experts"
        given, found = dict(args), []
        for pool, part in zip(self._threads, self.parts, strict=True):
            assert part.worker is not None
            found.append(pool.submit(partial(feature(part.worker, RankBalancing).control, **given)))
        return [one.result(timeout=60) for one in found]

    def facts(self) -> ExecutorFacts:
        return self._facts

    def shutdown(self, *, wait: bool = True) -> None:
        for pool in self._threads:
            pool.shutdown()


def make_groups(plans: list[EnginePlan], checked: bool = True) -> list[RankGroups]:
    """The groups of every rank, as threads that exchange tensors."""
    parallel = plans[0].mesh.parallel
    found: list[dict[str, Any]] = [{} for _ in plans]
    for name, members in (
        ("tp", tp_members),
        ("dcp", dcp_members),
        ("pp", pp_members),
        ("tokens", pp_members),
        ("ep", ep_members),
        ("movers", mover_members),
    ):
        for numbers in members(parallel):
            if len(numbers) > 1:
                for number, group in zip(numbers, SimulatedRanks(len(numbers)).groups, strict=True):
                    compared = checked and name != "movers"
                    found[number][name] = CheckedGroup(group, torch.device("cpu")) if compared else group
    return [RankGroups(**one) for one in found]


def simulated(
    folder: str | Path, *, tp: int = 1, pp: int = 1, dp: int = 1, experts: bool = False, **options: Any
) -> tuple[Core, list[Parts]]:
    """A core over ranks that are threads, and the ranks' parts. Replicas share their experts."""
    config = EngineConfig.from_flat(
        model=str(folder),
        device="cpu",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        enable_expert_parallel=experts,
        **options,
    )
    found = read_files(config)
    plans = plan_ranks(config, found)
    for plan in plans:
        check(plan.meetings)
    loaded = [
        load_rank(plan, one, None, on_loading=lambda done, total: None, end_phase=lambda name: None)
        for plan, one in zip(plans, make_groups(plans), strict=True)
    ]
    sizes = shared_sizes([resolve_sizing(plan, 1 << 28) for plan in plans])
    parts = each([partial(one.finish, size, Outside()) for one, size in zip(loaded, sizes, strict=True)])
    cores = [_core(parts[first : first + tp * pp], found) for first in range(0, len(parts), tp * pp)]
    return join_replicas(plans[0], cores, threading.Event()), parts


def _core(parts: list[Parts], found: Found) -> EngineCore:
    """The core of a replica."""
    parallel = parts[0].plan.mesh.parallel
    lead = parts[parallel.lead]
    answers = replace(
        lead,
        depth=max(parallel.pp, lead.depth),
        num_stages=parallel.pp,
        executor=lambda facts: SimulatedExecutor(parts, facts, parallel.lead),
    )
    compiler = GrammarCompiler(lambda: Tokenizer.load(found.tokenizer_folder), found.args.vocab_size, GrammarTrial(), 1)
    return assemble_core(answers, compiler)


def each(work: list[Callable[[], R]]) -> list[R]:
    """Run the work of every rank at the same time."""
    with ThreadPoolExecutor(len(work)) as threads:
        return [future.result(timeout=120) for future in [threads.submit(one) for one in work]]

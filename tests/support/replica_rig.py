"""Replicas of attention on mock executors: those of lock-step meet in every step, independent ones come late or die."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from quire.contracts.errors import EngineDead
from quire.contracts.output import StepOutputs, StepStats
from quire.contracts.step import I32, StepPlan, StepResult
from quire.engine.core import EngineCore
from quire.engine.replicas import STATES, Replicas

from ..unit.engine.conftest import EngineRig
from .checked_executor import CheckedExecutor

TOTALS = ("num_preempted",)  # statistics since the start; they never decrease


SIZES = ("num_blocks", "num_used")  # of a tier; its other statistics are totals, too


def _totals(stats: StepStats) -> dict[str, float]:
    """Return the statistics since the start, by name."""
    tiers = {
        f"{tier} {name}": value
        for tier, one in stats.tiers.items()
        for name, value in msgspec.structs.asdict(one).items()
        if name not in SIZES
    }
    drafts = {f"drafts {i}": count for i, count in enumerate(stats.drafts)}
    prefix = {"prefix queries": stats.prefix.queries, "prefix hits": stats.prefix.hits}
    return {name: getattr(stats, name) for name in TOTALS} | prefix | drafts | tiers


class Deadlock(AssertionError):
    """A caller waits for a result that cannot come before the caller goes on."""


class Disagreement(AssertionError):
    """Replicas do not take the same step at the same time."""


class Meeting:
    """The exchanges of replicas in lock-step. A step computes when every replica has it and has sampled the one before.

    plans      of each replica, by step;  released   number of steps that each replica may sample
    """

    def __init__(self, count: int) -> None:
        self.plans: list[list[StepPlan]] = [[] for _ in range(count)]
        self.released = [0] * count

    def take(self, replica: int, plan: StepPlan, *, drafts: bool = False) -> None:
        """Take the plan of a replica. Raises `Disagreement` where it differs from those of the others.

        drafts   True: the drafter has layers, and the record must tell the passes of this replica
        """
        if plan.step != len(self.plans[replica]):
            raise Disagreement(f"replica {replica}: step {plan.step} after {len(self.plans[replica])} steps")
        if plan.sync is None:
            raise Disagreement(f"replica {replica} takes step {plan.step} alone")
        rows, own = plan.sync.rows, int(plan.num_tokens.sum())
        if len(rows) != len(self.plans) or rows[replica] != own:
            raise Disagreement(f"replica {replica} of {len(self.plans)} computes {own} tokens, not as in {rows}")
        if drafts:
            _check_passes(replica, plan)
        for number, others in enumerate(self.plans):
            if len(others) > plan.step and others[plan.step].sync != plan.sync:
                raise Disagreement(f"step {plan.step}: {plan.sync} at {replica}, {others[plan.step].sync} at {number}")
        self.plans[replica].append(plan)

    def wait(self, replica: int, step: int) -> None:
        """Wait for the result of a step. Raises `Deadlock` when it cannot come before the caller goes on."""
        for number, plans in enumerate(self.plans):
            if len(plans) <= step:
                raise Deadlock(f"replica {replica} waits for step {step}, which replica {number} does not have")
            if self.released[number] < step + (number == replica):
                raise Deadlock(f"replica {replica} waits for step {step}; replica {number} has not sampled before it")


def _check_passes(replica: int, plan: StepPlan) -> None:
    """Raise `Disagreement` where the record does not tell the passes that a replica's drafter needs."""
    told, count = plan.sync.drafts if plan.sync is not None else None, plan.num_decodes
    if told is None:
        raise Disagreement(f"step {plan.step}: nobody knows the drafts of replica {replica}")
    most = int(plan.num_tokens[:count].max()) - 1 if count else 0
    own = count, len(plan.slots) > count
    if (runs := plan.features.runs) is not None:  # a pipeline drafts for the slots that it has sampled
        most, own = runs.most if runs.num_drafting else 0, (runs.num_drafting, own[1])
    if (told.decodes[replica], told.prompts[replica]) != own or told.most < most:
        raise Disagreement(f"replica {replica} has {own} and {most} drafts, not as in {told}")


class RepeatableMock(CheckedExecutor):
    """A mock with any lag of decodes and any number of stages."""

    def __init__(self, lag: int, stages: int, **options: Any) -> None:
        super().__init__(**options)
        self._facts = msgspec.structs.replace(self._facts, decode_lag=lag, num_stages=stages)
        self.num_collected = 0


class MeetingMock(RepeatableMock):
    """A replica in lock-step."""

    def __init__(self, meeting: Meeting, replica: int, *shape: int, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.meeting, self.replica = meeting, replica

    def submit(self, plan: StepPlan) -> None:
        self.meeting.take(self.replica, plan, drafts=self._facts.drafts_cached)
        super().submit(plan)

    def release(self, step: int, masks: I32) -> None:
        super().release(step, masks)
        self.meeting.released[self.replica] = step + 1

    def collect(self) -> StepResult:
        self.meeting.wait(self.replica, self.num_collected)
        self.num_collected += 1
        return super().collect()


class LonelyMock(RepeatableMock):
    """An independent replica. Its results wait while it is `held`, and it raises `fault` once it is dead.

    waited   calls that would have waited for a held result
    """

    def __init__(self, replica: int, *shape: int, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.replica, self.held, self.fault, self.waited = replica, False, "", 0

    def check_alive(self) -> None:
        if self.fault:
            raise EngineDead(self.fault)

    def ready(self) -> bool:
        return bool(self.fault or not self.held and self._results)

    def submit(self, plan: StepPlan) -> None:
        self.check_alive()
        super().submit(plan)

    def release(self, step: int, masks: I32) -> None:
        self.check_alive()
        super().release(step, masks)

    def collect(self) -> StepResult:
        self.check_alive()
        self.waited += self.held
        return super().collect()

    def control(self, name: str, args: dict[str, Any]) -> object:
        self.check_alive()
        assert self._waiting is None, "a step is half submitted"
        return [f"{name} of {self.replica}"]


class Arrived(threading.Event):
    """The arrival of a result: all results that are held arrive when somebody waits."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._arrive = arrive

    def wait(self, timeout: float | None = None) -> bool:
        self._arrive()
        return True


class ReplicaRig(EngineRig):
    """`Replicas` over mocks as one engine, with the record of `EngineRig`; `rigs` holds a plain rig for each replica.

    home   handle -> number of the replica that got the request
    """

    def __init__(
        self, count: int, *, lockstep: bool, depth: int = 1, lag: int = 0, stages: int = 1, **sizes: Any
    ) -> None:
        super().__init__(depth, **sizes)
        self.lockstep, self.meeting, shape = lockstep, Meeting(count), (lag or depth, stages)
        kinds: list[Any] = [
            partial(MeetingMock, self.meeting, i, *shape) if lockstep else partial(LonelyMock, i, *shape)
            for i in range(count)
        ]
        self.rigs = [EngineRig(depth, **sizes | {"mock": kind}) for kind in kinds]
        self.mocks: list[Any] = [rig.mock for rig in self.rigs]
        self.cores: list[EngineCore] = [rig.core for rig in self.rigs]
        for rig in self.rigs:
            rig.mock.fail = self.mock.fail
        self.replicas = Replicas(self.cores, lockstep=lockstep, arrived=Arrived(self._arrive))
        self.core: Any = self.replicas
        self.home: dict[int, int] = {}
        self.num_tokens = 0
        self.totals = StepStats()

    def _arrive(self) -> None:
        for mock in self.mocks:
            mock.held = False

    @property
    def alive(self) -> list[int]:
        """Numbers of the replicas that are not dead, buried or not."""
        return [i for i, mock in enumerate(self.mocks) if not getattr(mock, "fault", "")]

    @property
    def requests(self) -> dict[int, Any]:
        return {handle: request for i in self.alive for handle, request in self.cores[i]._requests.items()}

    def pass_time(self, seconds: float) -> None:
        """Advance the clocks of all cores."""
        for rig in (self, *self.rigs):
            rig.now += seconds

    def add(self, *args: Any, **fields: Any) -> int:
        handle = super().add(*args, **fields)
        (self.home[handle],) = (i for i, core in enumerate(self.cores) if handle in core._requests)
        return handle

    def step(self, times: int = 1) -> StepOutputs:
        for _ in range(times):
            super().step()
            for rig in self.rigs:
                rig.jobs.run_one()
            stats = self.outputs.stats
            totals, before = _totals(stats), _totals(self.totals)
            assert all(totals.get(name, 0) >= total for name, total in before.items()), "a total decreased"
            self.totals = stats
            self.num_tokens += stats.num_tokens
        return self.outputs

    def assert_idle(self) -> None:
        for i in self.alive:
            self.rigs[i].assert_idle()
        self.replicas.check()
        states = [self.cores[i].state().stats for i in self.alive]
        if len(states) == len(self.cores):
            merged = self.step().stats
            for name in STATES:
                assert getattr(merged, name) == sum(getattr(one, name) for one in states), name
            assert self.num_tokens == sum(int(plan.num_tokens.sum()) for rig in self.rigs for plan in rig.plans)

    def judge(self, handle: int) -> None:
        finish, got = self.finish[handle], self.tokens[handle]
        if finish.error != "replica":
            super().judge(handle)
            return
        fault = self.mocks[self.home[handle]].fault
        assert fault and finish.message is not None and finish.vector is None
        assert finish.message.startswith(f"replica {self.home[handle]} stopped: {fault} Send the request again")
        assert not got or got == self.answer(handle)[0][: len(got)]
        self._judge_rows(handle, complete=False)

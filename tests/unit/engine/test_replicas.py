"""Replicas behind one engine, in any order of events: no deadlock, nothing leaks, every request gets its tokens."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec import structs

from quire.contracts.errors import ConfigError, EngineDead, InvalidParameter, PromptTooLong, QueueFull
from quire.contracts.protocols import Wait
from quire.contracts.request import FinishReason
from quire.contracts.step import StepSync, Tier
from quire.contracts.structured import StructuredOutputsParams
from quire.engine import replicas
from quire.engine.core import EngineCore
from quire.engine.replicas import load

from ...support.full import FULL, full_rows
from ...support.pairwise import Row, pairwise
from ...support.replica_rig import Deadlock, Disagreement, ReplicaRig

VOCAB, MAX_LEN = 7, 44  # few letters: prompts collide, and answers collide with prompts
STEMS = st.sampled_from([[], [0] * 9, [0, 1] * 6, [0] * 5 + [1] * 9])
PROMPTS = st.builds(list.__add__, STEMS, st.lists(st.integers(0, 2), min_size=1, max_size=12))
GRAMMARS = [
    StructuredOutputsParams(**fields).spec()
    for fields in (
        {"regex": "[ab]*c"},
        {"choice": ["abba", "cafe", "face"]},
        {"regex": "a+b", "after": "cc", "budget": 3},
        {"grammar": 'start: "a" start "b" | "c"'},
        {"regex": "(a"},
    )
]
SHAPES = st.sampled_from([(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (2, 1, 2), (4, 1, 4)])  # depth, lag, stages
KINDS = st.sampled_from(["plain"] * 6 + ["grammar", "pool", "scored"])


class ReplicaMachine(RuleBasedStateMachine):
    """Requests come, grow and go at any of the replicas."""

    lockstep = True
    drafting = False  # True: always by layers
    plant: Callable[[ReplicaRig], None] | None = None

    @initialize(
        count=st.integers(2, 4),
        shape=SHAPES,
        blocks=st.integers(5, 12),
        slots=st.integers(1, 4),
        extra=st.integers(0, 12),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_waiting=st.sampled_from([2, 1000]),
        drafts=st.sampled_from([0, 0, 3]),
        layers=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (None, 5)]),
    )
    def start(
        self,
        count: int,
        shape: tuple[int, int, int],
        blocks: int,
        slots: int,
        extra: int,
        caching: bool,
        policy: str,
        max_waiting: int,
        drafts: int,
        layers: bool,
        windows: tuple[int | None, ...],
    ) -> None:
        depth, lag, stages = shape
        drafts, layers = (3, True) if self.drafting else (drafts, layers)
        self.rig = ReplicaRig(
            count,
            lockstep=self.lockstep,
            depth=depth,
            lag=lag,
            stages=stages,
            slots=slots,
            blocks=blocks * len(windows),
            budget=slots + extra,
            caching=caching,
            policy=policy,
            max_waiting=max_waiting,
            drafts=drafts,
            accepts=(2, 0, 3, 1),
            drafts_cached=layers and drafts > 0,
            windows=windows,
            max_len=MAX_LEN,
            vocab=VOCAB,
        )
        self.bound = max_waiting
        if self.plant is not None:
            type(self).plant(self.rig)  # type: ignore[misc]

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([0, 1, 5, 16, 20]),
        kind=KINDS,
        data=st.data(),
        stops=st.sampled_from([(), (), (3,), (1, 5)]),
        priority=st.integers(-1, 1),
        children=st.sampled_from([0, 0, 2]),
        lives=st.sampled_from([None] * 6 + [0, 3]),
        fail_after=st.sampled_from([None] * 8 + [0, 2, 9]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        kind: str,
        data: st.DataObject,
        stops: tuple[int, ...],
        priority: int,
        children: int,
        lives: float | None,
        fail_after: int | None,
    ) -> None:
        rig = self.rig
        fields: dict[str, Any] = {
            "stop_ids": stops,
            "priority": priority,
            "deadline": None if lives is None else rig.now + lives,
        }
        if kind == "pool":
            fields |= {"pool": data.draw(st.sampled_from(["mean", "last", "cls"])), "stop_ids": ()}
            fields |= {"read_prefix_cache": fields["pool"] == "last"}
            max_tokens, children = 0, 0
        elif kind == "grammar":
            fields |= {"grammar": data.draw(st.sampled_from(GRAMMARS))}
        parent = self.add_one(
            prompt, max_tokens, scored=kind == "scored", fail_after=fail_after, places=1 + children, **fields
        )
        for index in range(children if parent is not None else 0):
            child = rig.add(prompt, max_tokens, seed=100 + index, parent=parent, **fields)
            assert rig.home[child] == rig.home[parent], "a child is not where its parent's blocks are"

    def add_one(self, prompt: list[int], max_tokens: int, *, places: int = 1, **fields: Any) -> int | None:
        """Add a request, which is refused exactly when it fits into no replica. Returns its handle."""
        rig, core, end = self.rig, self.rig.cores[0], len(prompt) + max_tokens
        if end > MAX_LEN or core.scheduler.allocator.most_blocks(end, core._most_in_flight) > core.facts.num_blocks:
            with pytest.raises(PromptTooLong):
                rig.add(prompt, max_tokens, **fields)
            return None
        most = self.bound + core.facts.num_slots
        excess = {i: len(rig.cores[i].handles) - core.facts.num_slots for i in rig.alive}  # of free slots
        total = sum(excess.values())
        if all(self.bound - own - max(0, total - own) < places for own in excess.values()):
            with pytest.raises(QueueFull if places <= most else InvalidParameter):
                rig.add(prompt, max_tokens, places=places, **fields)
            return None
        handle: int = rig.add(prompt, max_tokens, places=places, **fields)
        self.added(handle)
        return handle

    def added(self, handle: int) -> None:
        """Check a request that was just taken."""

    @precondition(lambda self: self.rig.asked)
    @rule(data=st.data())
    def late_child(self, data: st.DataObject) -> None:
        """A child whose parent may be in any state, or gone."""
        rig = self.rig
        parent = data.draw(st.sampled_from(sorted(rig.asked)))
        asked = rig.asked[parent]
        rig.add(rig.prompts[parent], asked.max_tokens, parent=parent, grammar=asked.grammar)

    @precondition(lambda self: self.rig.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.asked))))

    @rule(asked=st.lists(st.tuples(PROMPTS, st.sampled_from([5, 16, 20]), st.integers(-1, 1)), min_size=2, max_size=8))
    def burst(self, asked: list[tuple[list[int], int, int]]) -> None:
        for prompt, max_tokens, priority in asked:
            self.add_one(prompt, max_tokens, priority=priority)

    @rule(times=st.sampled_from([1, 1, 2, 3, 7]))
    def step(self, times: int) -> None:
        before = self.rig.totals.num_preempted
        self.rig.step(times)
        if self.rig.totals.num_preempted > before:
            event("preempted")
        busy = sum(core.has_work for core in self.rig.cores)
        event(f"{'all' if busy == len(self.rig.cores) else 'some' if busy else 'none'} busy")

    @rule()
    def time_passes(self) -> None:
        self.rig.pass_time(2)

    @rule(all_of_them=st.sampled_from([False] * 4 + [True]))
    def go_idle(self, all_of_them: bool) -> None:
        """Abort requests, so that later ones join replicas that have nothing to do."""
        for handle in self.rig.core.handles:
            if all_of_them or self.rig.home[handle] == 0:
                self.rig.abort(handle)

    @rule()
    def reset_prefix_cache(self) -> None:
        idle = not any(len(self.rig.cores[i].scheduler.table) for i in self.rig.alive)
        assert self.rig.core.reset_prefix_cache() == idle

    def teardown(self) -> None:
        if not hasattr(self, "rig") or self.rig.replicas.torn:
            return
        self.rig.drain()
        for handle in self.rig.asked:
            self.rig.judge(handle)
        if self.lockstep:
            assert len({len(plans) for plans in self.rig.meeting.plans}) == 1


class DraftingMachine(ReplicaMachine):
    """Replicas in lock-step with drafters that have layers, also in pipelines."""

    drafting = True


class IndependentMachine(ReplicaMachine):
    """Replicas that are ready at any time, and that die at any time; one lives to the end."""

    lockstep = False

    def added(self, handle: int) -> None:
        assert self.rig.home[handle] in self.rig.alive, "a request went to a dead replica"

    @rule(data=st.data(), held=st.booleans())
    def hold(self, data: st.DataObject, held: bool) -> None:
        data.draw(st.sampled_from(self.rig.mocks)).held = held

    @precondition(lambda self: len(self.rig.alive) > 1)
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def die(self, data: st.DataObject, really: bool) -> None:
        victim = data.draw(st.sampled_from(self.rig.alive))
        if not really:
            return
        event(f"dies {'at work' if self.rig.cores[victim].has_work else 'idle'}")
        self.rig.mocks[victim].fault = f"planted in {victim}"

    @rule()
    def look(self) -> None:
        """An idle engine looks for dead replicas."""
        self.rig.core.executor.check_alive()
        self.rig.core.check()
        assert [self.rig.cores.index(core) for core in self.rig.replicas.live] == self.rig.alive

    @rule()
    def control(self) -> None:
        self.rig._arrive()  # an operation waits for all replicas
        assert self.rig.core.executor.control("name", {}) == [f"name of {i}" for i in self.rig.alive]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "rig"):
            assert not any(mock.waited for mock in self.rig.mocks), "all replicas waited for one"


def explore(machine: Callable[[], ReplicaMachine], examples: int, **options: Any) -> None:
    """Run random schedules. A slow machine is no fault of a schedule."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.parametrize("examples", [30, *full_rows([2_000] * 5)])
@pytest.mark.parametrize("machine", [ReplicaMachine, DraftingMachine, IndependentMachine])
def test_random_schedules(machine: type[ReplicaMachine], examples: int) -> None:
    explore(machine, examples * (2 if machine.drafting and not FULL else 1))


def chaos(rig: ReplicaRig, rng: random.Random, seen: Counter[str], num_requests: int = 40) -> None:
    """Requests come, grow and go at random until all are done; `seen` counts what happened."""
    while len(rig.asked) < num_requests or rig.core.has_work:
        if len(rig.asked) < num_requests and rng.random() < 0.4:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
            fields: dict[str, Any] = {
                "stop_ids": rng.choice([(), (), (3, 5)]),
                "grammar": rng.choice([None] * 6 + GRAMMARS),
                "deadline": rng.choice([None] * 5 + [rig.now + 3]),
            }
            max_tokens = rng.choice([1, 5, 16])
            if rng.random() < 0.1:
                fields, max_tokens = {"pool": "last"}, 0
            parent = rig.add(prompt, max_tokens, scored=rng.random() < 0.2, **fields)
            if not fields.get("pool"):
                for _ in range(rng.choice([0, 0, 2])):
                    rig.add(prompt, max_tokens, parent=parent, **fields)
        if rig.core.handles and rng.random() < 0.04:
            rig.abort(rng.choice(rig.core.handles))
        if not rig.lockstep:
            rng.choice(rig.mocks).held = rng.random() < 0.7
            if len(rig.alive) > 1 and rng.random() < 0.005:
                victim = rng.choice(rig.alive)
                seen["dies at work"] += bool(rig.cores[victim].in_flight)
                rig.mocks[victim].fault = f"planted in {victim}"
        elif any(rig.cores[i].has_work for i in rig.alive):
            seen["idle beside others"] += sum(not core.has_work for core in rig.cores)
        rig.pass_time(0.3)
        rig.step()


FEATURES: dict[str, list[Any]] = {
    "shape": [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (2, 1, 2), (4, 1, 4)],  # depth, lag, stages
    "count": [2, 3, 4],
    "lockstep": [True, False],
    "drafts": [(0, False), (3, False), (3, True)],  # how many; True: of a drafter with layers
    "windows": [(None,), (None, 6)],
    "caching": [True, False],
    "policy": ["fcfs", "priority"],
    "host_blocks": [0, 12],
}
LONG = pairwise(FEATURES)
MET: dict[
    str, Callable[[Row], bool]
] = {  # what happens beside every feature -> True for the runs that it can happen in
    "preempted": lambda row: True,
    "hits": lambda row: True,
    "masked tokens": lambda row: True,
    "vectors": lambda row: True,
    "children": lambda row: True,
    "finish abort": lambda row: True,
    "finish deadline": lambda row: True,
    "prompts beside decodes": lambda row: True,
    "drafted": lambda row: row["drafts"][0] > 0,
    "loaded": lambda row: row["host_blocks"] > 0,
    "empty steps": lambda row: row["lockstep"],
    "finish replica": lambda row: not row["lockstep"],
}


def test_long_runs_meet_everything() -> None:
    """Fixed seeds, so that what was exercised can be counted and compared with zero.

    Every pair of features meets in a run, and each that `MET` counts meets every feature.
    """
    seen: Counter[Any] = Counter()
    for seed, row in enumerate(LONG * (2 if FULL else 1)):
        rng, run, (depth, lag, stages) = random.Random(seed), Counter[str](), row["shape"]
        below = {"host_blocks": row["host_blocks"], "reserve": 4, "delays": (0, 1, 0, 2), "faults": ("", "", "half")}
        rig = ReplicaRig(
            row["count"],
            depth=depth,
            lag=lag,
            stages=stages,
            slots=rng.choice([3, 6]),
            blocks={1: 10, 2: 17}[len(row["windows"])],
            budget=rng.choice([7, 16]),
            vocab=VOCAB,
            drafts=row["drafts"][0],
            accepts=[rng.randint(0, row["drafts"][0]) for _ in range(11)],
            drafts_cached=row["drafts"][1],
            **{name: row[name] for name in ("lockstep", "windows", "caching", "policy")},
            **(below if row["host_blocks"] else {}),
        )
        chaos(rig, rng, run)
        rig.drain()
        count(rig, run)
        for name in (name for name, possible in MET.items() if possible(row)):
            seen.update({(name, feature): run[name] for feature in row.items()})
        seen += run
    never = [key for key, times in seen.items() if isinstance(key, tuple) and not times]
    assert not never, f"these do not meet: {never}"
    expected = {
        "preempted": 20,
        "hits": 300,
        "masked tokens": 200,
        "vectors": 10,
        "children": 50,
        "finish stop": 10,
        "finish length": 100,
        "finish abort": 10,
        "finish deadline": 10,
        "prompts beside decodes": 100,
        "finish invalid_grammar": 5,
        "empty steps": 300,
        "idle beside others": 100,
        "finish replica": 10,
        "dies at work": 3,
    }
    short = {name: (seen[name], least) for name, least in expected.items() if seen[name] < least}
    assert not short, f"seen less often than the test is worth: {short}; all: {dict(seen)}"


def count(rig: ReplicaRig, seen: Counter[str]) -> None:
    """Judge all requests of a rig and count what a run of it has met."""
    for handle in rig.asked:
        rig.judge(handle)
        finish = rig.finish[handle]
        seen[f"finish {finish.error or finish.reason.value}"] += 1
        seen["masked tokens"] += len(rig.tokens[handle]) if rig.asked[handle].grammar else 0
        seen["vectors"] += finish.vector is not None
        seen["children"] += rig.asked[handle].parent is not None
    plans = [plan for one in rig.rigs for plan in one.plans]
    seen["empty steps"] += sum(not len(plan.slots) for plan in plans)
    seen["prompts beside decodes"] += sum(0 < plan.num_decodes < len(plan.slots) for plan in plans)
    seen["drafted"] += sum(int(plan.num_tokens[: plan.num_decodes].sum()) - plan.num_decodes for plan in plans)
    seen["preempted"] += rig.totals.num_preempted
    seen["hits"] += rig.totals.prefix.hits
    seen["loaded"] += sum(tier.num_loaded for tier in rig.totals.tiers.values())


# --- faults of lock-step that the simulation must find ----------------------------------------------------------------


def each_submit(rig: ReplicaRig, change: Callable[[int, EngineCore, Any], Any]) -> None:
    """Replace every core's `submit`: `change` gets the replica's number, the core and its own `submit`."""
    for number, core in enumerate(rig.cores):
        core.submit = change(number, core, core.submit)  # type: ignore[method-assign]


def skips_an_empty_step(rig: ReplicaRig) -> None:
    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, sync) if planned else None)


def does_not_count_an_empty_step(rig: ReplicaRig) -> None:
    def change(number: int, core: Any, submit: Any) -> Any:
        def changed(planned: Any, sync: StepSync | None = None) -> Any:
            outputs = submit(planned, sync)
            core._step -= planned is None
            return outputs

        return changed

    each_submit(rig, change)


def has_another_step_number(rig: ReplicaRig) -> None:
    rig.cores[1]._step = 1


def pads_its_rows(rig: ReplicaRig) -> None:
    def padded(sync: StepSync) -> StepSync:
        return structs.replace(sync, rows=tuple(-(-rows // 8) * 8 for rows in sync.rows))

    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, padded(sync)))


def knows_only_its_own_rows(rig: ReplicaRig) -> None:
    def own(number: int, sync: StepSync) -> StepSync:
        return structs.replace(sync, rows=tuple(rows * (i == number) for i, rows in enumerate(sync.rows)))

    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, own(number, sync)))


def knows_only_its_own_drafts(rig: ReplicaRig) -> None:
    def own(number: int, sync: StepSync) -> StepSync:
        if sync.drafts is None:
            return sync
        decodes = tuple(count * (i == number) for i, count in enumerate(sync.drafts.decodes))
        return structs.replace(sync, drafts=structs.replace(sync.drafts, decodes=decodes))

    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, own(number, sync)))


def drafts_as_many_as_it_likes(rig: ReplicaRig) -> None:
    def changed(number: int, sync: StepSync) -> StepSync:
        if sync.drafts is None:
            return sync
        return structs.replace(sync, drafts=structs.replace(sync.drafts, most=number * sync.drafts.most))

    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, changed(number, sync)))


def takes_a_step_alone(rig: ReplicaRig) -> None:
    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, sync if planned else None))


def waits_before_all_have_the_step(rig: ReplicaRig) -> None:
    each_submit(rig, lambda number, core, submit: lambda planned, sync=None: submit(planned, sync) or core.confirm())


PLANTED = {
    skips_an_empty_step: (Deadlock, Disagreement),
    does_not_count_an_empty_step: Disagreement,
    has_another_step_number: Disagreement,
    pads_its_rows: Disagreement,
    knows_only_its_own_rows: Disagreement,
    knows_only_its_own_drafts: Disagreement,
    drafts_as_many_as_it_likes: Disagreement,
    takes_a_step_alone: Disagreement,
    waits_before_all_have_the_step: Deadlock,
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_local_decision_is_noticed(plant: Callable[[ReplicaRig], None], depth: int) -> None:
    """Both replicas have a request, and the first one's ends early. Without the fault all is well."""
    for planted in (None, plant):
        rig = ReplicaRig(2, lockstep=True, depth=depth, drafts=2, accepts=(1, 0), drafts_cached=True)
        rig.add([1, 2, 3], 4), rig.add([4, 5], 12)
        if planted is None:
            rig.drain()
            continue
        planted(rig)
        with pytest.raises(PLANTED[plant]):
            rig.drain()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_random_schedules_find_a_local_decision(plant: Callable[[ReplicaRig], None]) -> None:
    class Planted(ReplicaMachine):
        pass

    Planted.plant = staticmethod(plant)  # type: ignore[assignment]
    with pytest.raises((Deadlock, Disagreement, AssertionError)):
        explore(Planted, 20, phases=[Phase.generate], database=None, report_multiple_bugs=False)


# --- lock-step --------------------------------------------------------------------------------------------------------


def test_every_replica_takes_every_step(depth: int) -> None:
    """A replica has a request, then another one joins; rows of replicas without tokens are 0."""
    rig = ReplicaRig(3, lockstep=True, depth=depth, budget=4)
    rig.add([1] * 10, 6)
    rig.step(3)
    rig.add([2, 3], 4)
    rig.drain()
    plans = rig.meeting.plans
    assert len({len(own) for own in plans}) == 1
    assert all(one.sync == two.sync == three.sync for one, two, three in zip(*plans, strict=True))
    assert [plan.sync.rows for plan in plans[0]][:3] == [(4, 0, 0), (4, 0, 0), (2, 0, 0)]
    assert all(not len(plan.slots) for plan in plans[2])
    assert sum(plan.sync.rows[1] for plan in plans[0]) == 2 + 3


def test_all_replicas_have_a_step_before_masks_are_made() -> None:
    """The masks of a step need the result of the step before. The others compute meanwhile."""
    rig = ReplicaRig(2, lockstep=True, depth=2, vocab=VOCAB)
    rig.add([1, 2], 8, grammar=GRAMMARS[0]), rig.add([3, 4], 8)
    seen = Counter[int]()
    for number, mock in enumerate(rig.mocks):

        def collect(number: int = number, collect: Any = mock.collect) -> Any:
            seen[min(map(len, rig.meeting.plans)) - rig.mocks[number].num_collected] += 1
            return collect()

        mock.collect = collect
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)
    assert seen[2] > 8, f"steps that all have while one waits for a result: {seen}"


def test_a_fault_of_a_replica_in_lock_step_ends_all() -> None:
    rig = ReplicaRig(2, lockstep=True)
    rig.add([1, 2], 8), rig.add([3, 4], 8)

    def fail() -> None:
        raise EngineDead("planted")

    rig.mocks[1].collect = fail
    with pytest.raises(EngineDead, match="planted"):
        rig.step()
    assert rig.core.torn
    with pytest.raises(EngineDead, match="an earlier step"):
        rig.step()
    rig.mocks[1].check_alive = fail
    with pytest.raises(EngineDead, match="planted"):
        rig.core.executor.check_alive()


def test_outputs_of_all_replicas_are_those_of_one_step() -> None:
    rig = ReplicaRig(2, lockstep=True)
    first, second = rig.add([1, 2, 3], 3, scored=True), rig.add([4, 5], 3)
    outputs = rig.step()
    assert outputs.handles.tolist() == [first, second] and outputs.handles.dtype == np.int32
    assert outputs.cached == {first: 0, second: 0} and outputs.prompt_logprobs.keys() == {first}
    stats = outputs.stats
    assert (stats.step, stats.num_tokens, stats.num_prefill_tokens) == (0, 5, 5)
    assert (stats.num_scheduled, stats.num_prefills, stats.num_running, stats.num_waiting) == (2, 2, 2, 0)
    assert stats.replicas == {0: 1, 1: 1} and stats.num_blocks == 80 and outputs.homes == {first: 0, second: 1}
    assert stats.num_free_blocks == 2 * 40 - 2 and rig.core.facts.num_blocks == 80 and rig.core.facts.num_slots == 16
    assert stats.prefix.queries == 5
    rig.step()
    finished = rig.step().finished
    assert [one.handle for one in finished] == [first, second]
    rig.drain()


# --- independent replicas ---------------------------------------------------------------------------------------------


def apart(count: int = 2, **options: Any) -> ReplicaRig:
    return ReplicaRig(count, lockstep=False, **options)


@pytest.mark.parametrize("when", ["before a step", "in flight", "at a look", "at an addition", "at a control"])
def test_a_dead_replica_is_buried_once(when: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = apart(depth=2)
    handles = [rig.add([i, 1, 2], 9) for i in range(4)]
    if when == "in flight":
        rig.mocks[0].held = rig.mocks[1].held = True
    rig.step(2)
    rig.mocks[0].fault = "planted"
    if when == "at a look":
        rig.core.executor.check_alive()
        assert rig.core.has_work, "the ends are not reported yet"
        rig.core.check()
    elif when == "at an addition":
        assert rig.home[rig.add([5], 3)] == 1
    elif when == "at a control":
        assert rig.core.executor.control("name", {}) == ["name of 1"]
    late = rig.add([6], 4)
    rig.drain()
    assert rig.home[late] == 1 and rig.mocks[0].closed and not rig.mocks[1].closed
    lost = [handle for handle in handles if rig.home[handle] == 0]
    assert len(lost) == 2
    for handle in rig.asked:
        assert (rig.finish[handle].error == "replica") == (handle in lost)
        rig.judge(handle)
    assert caplog.text.count("replica 0 of 2 stopped; the others go on: planted") == 1
    assert rig.core.handles == [] and not rig.core.has_work


def test_counters_of_a_replica_that_died_stay() -> None:
    """Its tier is gone; the blocks that went there are still counted, as its drafts are."""
    rig = apart(blocks=12, drafts=3, accepts=(2, 0, 3), host_blocks=20, write_through=True)
    for handle in [rig.add([i] * 9, 9) for i in range(2)]:
        rig.drain().judge(handle)
    before = rig.outputs.stats
    rig.mocks[0].fault = "planted"
    late = rig.add([6], 4)
    rig.drain().judge(late)
    found, tier = rig.outputs.stats, rig.outputs.stats.tiers[Tier.HOST]
    assert found.replicas.keys() == {1} and found.drafts[0] > before.drafts[0] > 0
    assert (tier.num_blocks, before.tiers[Tier.HOST].num_blocks) == (20, 40)
    assert tier.num_stored >= before.tiers[Tier.HOST].num_stored >= 4


def test_a_fault_of_ours_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """It ends one replica."""
    rig = apart()
    handles = [rig.add([i, 1], 4) for i in range(2)]
    rig.cores[0].begin_step = lambda: 1 / 0  # type: ignore[method-assign]
    rig.step()
    assert rig.finish[handles[0]].error == "replica" and "Traceback" in caplog.text and "ZeroDivision" in caplog.text
    assert "replica 0 stopped: ZeroDivisionError: division by zero. Send" in str(rig.finish[handles[0]].message)


@pytest.mark.parametrize("when", ["masks at a step", "masks at an operation", "a result"])
def test_tokens_that_were_confirmed_are_told_when_a_replica_dies(when: str) -> None:
    """It dies while it takes the masks of a step: the result of the step before has come. Or it dies later."""
    rig = apart(depth=2, vocab=VOCAB)
    handle = rig.add([1, 2], 9, grammar=GRAMMARS[0])
    other = rig.add([3], 5)
    mock, core = rig.mocks[rig.home[handle]], rig.cores[rig.home[handle]]
    rig.replicas._arrived.wait = lambda timeout=None: True  # type: ignore[method-assign]
    while not (core.needs_masks and len(core.in_flight) == 2):
        mock.held = True
        rig.step()
        mock.held = core.needs_masks
    before, died = len(rig.tokens[handle]), []

    def die(*given: Any) -> None:
        died.append(len(core.in_flight))
        mock.fault = "planted"
        raise EngineDead("planted")

    if when == "a result":
        results = iter([mock.collect])
        mock.collect = lambda: next(results, die)()
    else:
        mock.release = die
    mock.held = False
    if when == "masks at an operation":
        assert rig.core.executor.control("name", {}) == [f"name of {rig.home[other]}"]
    rig.step(2)
    assert died and rig.finish[handle].error == "replica"
    assert len(rig.tokens[handle]) == before + 1, "the result that had come"
    rig.drain()
    for one in rig.asked:
        rig.judge(one)


@pytest.mark.parametrize("when", ["at a step", "at a look", "at an addition"])
def test_the_error_of_the_last_replica_is_raised(when: str) -> None:
    """Every later call raises it, too."""
    rig = apart()
    rig.add([1, 2], 9), rig.add([3, 4], 9)
    rig.mocks[0].fault = "first"
    rig.step()
    rig.mocks[1].fault = "second"
    act = {"at a step": rig.step, "at a look": rig.core.executor.check_alive, "at an addition": lambda: rig.add([1])}
    for _ in range(2):
        with pytest.raises(EngineDead, match="an earlier step|second"):
            act[when]()
    for name, again in act.items():
        with pytest.raises(EngineDead, match="second" if name != "at a step" or when != name else "an earlier step"):
            again()
    rig.core.shutdown()
    assert all(mock.closed for mock in rig.mocks)


def test_a_dead_replica_that_is_idle_gets_no_request() -> None:
    """The others are at work, so that nobody looks."""
    rig = apart(3)
    for i in range(3):
        rig.add([i], 30)
    rig.abort(1)
    rig.step()
    rig.mocks[1].fault = "planted"
    handles = [rig.add([i, i], 3) for i in range(4)]
    rig.drain()
    assert all(rig.finish[handle].error is None and rig.home[handle] != 1 for handle in handles)


def test_a_step_notices_the_death_of_an_idle_replica() -> None:
    rig = apart()
    rig.add([1, 2], 9)
    idle = 1 - rig.home[0]
    rig.step()
    rig.mocks[idle].fault = "planted"
    assert rig.step().stats.replicas == {1 - idle: 1}


def waiting_for_masks() -> tuple[Any, int, Any]:
    """A rig, a request with a grammar, and the mock that has a step which waits for masks, behind a step that runs."""
    rig = apart(depth=2, vocab=VOCAB)
    handle = rig.add([1, 2], 9, grammar=GRAMMARS[0])
    mock, core = rig.mocks[rig.home[0]], rig.cores[rig.home[0]]
    rig.replicas._arrived.wait = lambda timeout=None: True  # type: ignore[method-assign]
    while not core.needs_masks:
        mock.held = True
        rig.step()
        mock.held = core.needs_masks
    return rig, handle, mock


def test_an_operation_finds_every_step_complete() -> None:
    """Masks of a step wait for the step before. An operation runs between two steps, so that it waits for both."""
    rig, handle, mock = waiting_for_masks()
    mock.held = False
    before = len(rig.tokens[handle])
    assert rig.core.executor.control("name", {}) == ["name of 0", "name of 1"]  # the mock looks at its step
    assert not rig.cores[rig.home[0]].needs_masks and not rig.tokens[handle][before:]
    rig.drain()
    rig.judge(handle)


def test_an_operation_is_sent_to_all_replicas_before_any_is_waited_for() -> None:
    """A replica that dies meanwhile is left out, and named; a mistake of the caller ends none."""
    rig, order = apart(3), list[str]()
    handles = [rig.add([i], 30) for i in range(3)]

    def ask(number: int, name: str) -> Wait:
        order.append(f"ask {number}")

        def wait(seconds: float | None) -> object:
            order.append(f"wait {number}")
            if name == "dance":
                raise ConfigError("unknown control")
            rig.mocks[1].fault = "rank 1 is stopped"
            rig.mocks[number].check_alive()
            return [number]

        return wait

    for number, mock in enumerate(rig.mocks):
        mock.ask = lambda name, args, number=number: ask(number, name)
    every = [f"{what} {number}" for what in ("ask", "wait") for number in range(3)]
    with pytest.raises(ConfigError):
        rig.core.executor.control("dance", {})
    assert order == every and len(rig.replicas.live) == 3
    order.clear()
    assert rig.core.executor.control("name", {}) == [0, 2] and order == every
    rig.step()
    (dead,) = [handle for handle in handles if handle in rig.finish]
    assert "replica 1 stopped: rank 1 is stopped" in str(rig.finish[dead].message)


def test_a_report_names_a_replica_that_does_not_answer() -> None:
    """Other operations wait: their values are needed."""
    rig, limits = apart(3), list[float | None]()

    def ask(number: int) -> Wait:
        def wait(seconds: float | None) -> object:
            limits.append(seconds)
            if number == 1 and seconds is not None:
                raise TimeoutError("rank 1 (replica 1), pid 7")
            return [number]

        return wait

    for number, mock in enumerate(rig.mocks):
        mock.ask = lambda name, args, number=number: ask(number)
    words = "replica 1 (rank 1 (replica 1), pid 7) has not answered in 1 s: it computes a long step, or hangs."
    assert rig.core.executor.control("describe", {}) == [0, {"silent": words}, 2] and len(rig.replicas.live) == 3
    assert all(seconds is not None and seconds <= 1.0 for seconds in limits)
    assert rig.core.executor.control("name", {}) == [0, 1, 2] and limits[3:] == [None] * 3


def test_a_report_does_not_wait_for_a_step_that_masks_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LIMITS", {"describe": 0.0})
    rig, handle, mock = waiting_for_masks()
    values = rig.core.executor.control("describe", {})
    assert [isinstance(value, dict) and "silent" in value for value in values] == [mock is each for each in rig.mocks]
    assert rig.cores[rig.home[0]].needs_masks and not mock.waited
    mock.held = False
    rig.drain()
    rig.judge(handle)


@pytest.mark.parametrize("dead", [False, True])
def test_all_replicas_are_told_to_end_before_any_is_waited_for(dead: bool) -> None:
    """The end of a dead replica is not waited for while the others serve."""
    rig, order = apart(3), list[tuple[int, bool]]()
    for number, mock in enumerate(rig.mocks):
        mock.shutdown = lambda *, wait=True, number=number: order.append((number, wait))
    if dead:
        rig.mocks[1].fault = "planted"
        rig.core.executor.check_alive()
        assert order == [(1, False)]
        order.clear()
    rig.core.shutdown()
    assert order == [(number, wait) for wait in (False, True) for number in range(3)]


def test_the_limit_of_waiting_requests_is_that_of_all_replicas_together() -> None:
    rig = apart(slots=1, max_waiting=2)
    for i in range(4):
        rig.add([i], 3)
    with pytest.raises(QueueFull, match=r"3 requests are waiting already \(max_waiting=2\) and 1 more do not fit"):
        rig.add([5], 3)
    rig.step()
    assert sorted(rig.home.values()) == [0, 0, 1, 1]
    with pytest.raises(QueueFull, match="2 requests are waiting already"):
        rig.add([5], 3)
    rig.drain()


def test_an_idle_engine_reports_a_death() -> None:
    """Metrics show the replicas that live, also before the next request."""
    rig = apart()
    assert not rig.core.has_work
    rig.mocks[0].fault = "planted"
    rig.core.executor.check_alive()
    assert rig.core.has_work and rig.step().stats.replicas == {1: 0} and not rig.core.has_work


def test_children_of_a_request_whose_replica_died_run_elsewhere() -> None:
    rig = apart()
    parent = rig.add([1, 2, 3], 9, places=2)
    rig.step()
    rig.mocks[rig.home[parent]].fault = "planted"
    rig.core.executor.check_alive()
    child = rig.add([1, 2, 3], 9, parent=parent)
    rig.drain()
    rig.judge(child)
    assert rig.finish[parent].error == "replica" and rig.finish[child].reason is FinishReason.LENGTH


def test_a_replica_that_computes_for_long_delays_no_other() -> None:
    """Also when it has a grammar, whose masks need the result of the step before."""
    rig = apart(depth=2, vocab=VOCAB)
    slow = rig.add([1, 2], 9, grammar=GRAMMARS[0])
    while not rig.tokens[slow]:
        rig.step()
    rig.replicas._arrived.wait = lambda timeout=None: True  # type: ignore[method-assign]
    rig.mocks[rig.home[slow]].held = True
    quick = rig.add([3, 4], 20)
    while quick not in rig.finish:
        rig.step()
    assert slow not in rig.finish and not any(mock.waited for mock in rig.mocks)
    rig._arrive()
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


def test_totals_do_not_decrease_when_a_replica_dies() -> None:
    rig = apart(blocks=6, max_len=24)
    for i in range(8):
        rig.add([i % 4] * 6, 12)
    while rig.totals.num_preempted < 2 or rig.totals.prefix.queries < 20:
        rig.step()
    rig.mocks[0].fault = "planted"
    rig.drain()  # the rig compares totals after every step
    stats = rig.totals
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (0, 0, 6, 6)
    assert stats.replicas == {1: 0}


# --- balance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_requests_are_shared_equally(count: int, lockstep: bool) -> None:
    """They pile up at first, then each ends before the next one comes. Counts of replicas are never stale."""
    rig, shares = ReplicaRig(count, lockstep=lockstep, slots=4, budget=32), Counter[int]()
    for i in range(40):
        shares[rig.home[rig.add([i % 5, 1], 3)]] += 1
        assert max(shares[k] for k in range(count)) - min(shares[k] for k in range(count)) <= 1
        if i >= 20:
            rig.drain()
    rig.drain()


@pytest.mark.parametrize("heavy", range(4))
def test_equal_replicas_share_equally_beside_a_loaded_one(heavy: int) -> None:
    """Requests that end before the next one comes: no order of replicas decides among the idle ones."""
    rig, shares = apart(4), Counter[int]()
    busy = [rig.add([i], 100) for i in range(4)]
    rig.step()
    for handle in busy:
        if rig.home[handle] != heavy:
            rig.abort(handle)
    for _ in range(12):
        handle = rig.add([1, 2], 1)
        shares[rig.home[handle]] += 1
        while handle not in rig.finish:
            rig.step()
    assert shares == {number: 4 for number in range(4) if number != heavy}


def test_shares_stay_equal_when_a_replica_dies() -> None:
    rig, shares = apart(4), Counter[int]()
    rig.mocks[2].fault = "planted"
    for _ in range(12):
        handle = rig.add([1, 2], 1)
        shares[rig.home[handle]] += 1
        rig.drain()
    assert shares == {0: 4, 1: 4, 3: 4}


def test_random_ends_leave_no_bias() -> None:
    """Lengths that nobody knows beforehand; over many requests each replica gets its share."""
    rng, rig, shares = random.Random(0), apart(3, slots=4), Counter[int]()
    for _ in range(600):
        shares[rig.home[rig.add([rng.randrange(5)], rng.choice([1, 2, 12]))]] += 1
        rig.step(rng.choice([0, 1, 1, 2, 5]))
    rig.drain()
    assert all(abs(share - 200) < 20 for share in shares.values()), shares


def test_a_replica_with_a_full_cache_gets_fewer() -> None:
    """Both have two requests. The first one's fill its cache, so that a third one waits there."""
    rig = apart(blocks=10, max_len=40, budget=64, caching=False)
    full = [rig.add([0] * 19, 20, places=0), rig.add([1], 3), rig.add([2] * 19, 20, places=0), rig.add([3], 3)]
    rig.step()
    assert [rig.home[handle] for handle in full] == [0, 1, 0, 1]
    waiting = rig.add([4] * 19, 20)
    assert rig.home[waiting] in (0, 1)
    rig.drain()


def test_load_is_the_score_of_the_facts() -> None:
    """Running and waiting requests, and 6 more for a waiting one when the cache is full; nothing up to half of it."""
    rig = apart(blocks=10, slots=3, max_len=40, budget=64, caching=False)
    core = rig.cores[0]
    assert load(core) == 0
    for handle, length in enumerate((19, 17, 1, 1)):
        core.add(new_request(rig, handle, length))
    assert load(core) == 4  # nothing is computed yet
    core.step()
    running, waiting = len(core.scheduler.table), len(core.scheduler.queue)
    used = 1 - core.scheduler.allocator.pool.num_free / 10
    assert (running, waiting, used) == (2, 2, 1.0)
    assert load(core) == running + waiting * (1 + 6 * 0.5)
    core.abort(0)
    assert used > 0.5 and load(core) < 2 + 2 * (1 + 6 * 0.5)


def new_request(rig: ReplicaRig, handle: int, length: int) -> Any:
    scratch = apart(1, blocks=10, max_len=40, caching=False)
    scratch.add([handle] * length, 3, handle=handle)
    return scratch.asked[handle]


def test_a_prompt_that_fits_elsewhere_is_not_refused() -> None:
    """The least loaded replica has no room for all completions, because its requests wait; another one has."""
    rig = apart(slots=2, max_waiting=2, blocks=10, max_len=40, budget=64, caching=False)
    big = rig.add([0] * 30, 8)  # fills a cache: whoever waits there counts four times
    for i in range(3):
        rig.add([i + 1], 30)
    rig.step()
    rooms = [4 - len(core.handles) for core in rig.cores]
    places = max(rooms)
    rig.add([6], 3, places=places)
    assert rig.home[big] in (0, 1)
    with pytest.raises(QueueFull):
        rig.add([6], 3, places=4)
    rig.drain()

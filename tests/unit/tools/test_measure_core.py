"""The engine benchmark runs the number of requests that it reports; requests end only with churn."""

import pytest

from measure_core import CASES, Case, CoreTimes, _Load, measure_core
from quire.contracts.step import StepPlan
from quire.engine.mock_executor import MockExecutor


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_running", [1, 24])
def test_without_churn_all_run_and_none_ends(num_running: int, depth: int) -> None:
    load = _Load(Case(num_running=num_running, depth=depth, churn=False))
    load.warm_up()
    for _ in range(20):
        outputs = load.step(CoreTimes(case=CASES[0]))
        assert len(outputs.handles) == num_running and not outputs.finished
    load.core.check()


def test_without_churn_blocks_fill_up_at_different_steps() -> None:
    load = _Load(Case(num_running=32, depth=1, churn=False))
    load.warm_up()
    pool = load.core.scheduler.allocator.pool
    taken = []
    for _ in range(16):
        before = pool.num_free
        load.step(CoreTimes(case=CASES[0]))
        taken.append(before - pool.num_free)
    assert sum(taken) == 32 and max(taken) <= 4


@pytest.mark.parametrize("depth", [1, 2])
def test_with_churn_requests_end_and_are_replaced(depth: int) -> None:
    load = _Load(Case(num_running=64, depth=depth, churn=True))
    load.warm_up()
    times, running = CoreTimes(case=CASES[0]), []
    for _ in range(130):
        load.step(times)
        running.append(len(load.core.scheduler.table))
    assert 100 < times.num_finished <= 130 + 2
    assert min(running) >= 60
    load.core.check()


def test_the_mocks_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the mock moves leaves nothing for the core."""
    import measure_core as engine

    now = [0]
    monkeypatch.setattr(engine, "perf_counter_ns", lambda: now[0])
    load = _Load(Case(num_running=2, depth=1, churn=False))
    collect, submit = engine.MockExecutor.collect, engine.MockExecutor.submit

    def slow_collect(mock: MockExecutor) -> object:
        now[0] += 1_000_000
        return collect(mock)

    def slow_submit(mock: MockExecutor, plan: StepPlan) -> None:
        now[0] += 500_000
        submit(mock, plan)

    monkeypatch.setattr(engine.MockExecutor, "collect", slow_collect)
    monkeypatch.setattr(engine.MockExecutor, "submit", slow_submit)
    times = CoreTimes(case=CASES[0])
    load.step(times)
    assert now[0] == 1_500_000 and times.core == [0.0]


def test_a_measurement_has_one_entry_per_step() -> None:
    times = measure_core(Case(num_running=4, depth=2, churn=True), num_steps=12)
    assert len(times.core) == len(times.front_end) == len(times.plan_encoding) == 12
    assert times.parts.keys() == {"plan", "finish", "blocks", "encode"}
    assert all(value > 0 for value in times.core)


def test_the_cases_cover_both_sizes_depths_and_churn() -> None:
    assert {(c.num_running, c.depth, c.churn) for c in CASES} == {
        (n, d, churn) for n in (1, 256) for d in (1, 2) for churn in (False, True)
    }

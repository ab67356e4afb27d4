"""Circuit breakers and the budget of retries by a clock of the test; the file of what a restart must not forget."""

from pathlib import Path

import pytest

from quire.contracts.errors import ConfigError
from quire.router.breaker import MOST_TIMES, Breaker, Circuit
from quire.router.budget import FIRST, MOST, RetryBudget
from quire.router.state import RouterState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(breaker: Breaker, ok: bool | None) -> None:
    assert breaker.allows
    breaker.end(breaker.begin(), ok)


def test_a_circuit_opens_is_tried_and_closes() -> None:
    clock = Clock()
    breaker = Breaker(3, 10.0, clock=clock)
    for ok in (False, False, True, False, None, False):  # a good one between, and one that proves nothing
        ask(breaker, ok)
    assert breaker.state is Circuit.CLOSED
    ask(breaker, False)
    assert breaker.state is Circuit.OPEN and not breaker.allows and breaker.wait == 10.0
    breaker.end(False, True)  # one that was sent before the circuit opened
    assert breaker.state is Circuit.OPEN
    clock.now += 10
    assert breaker.state is Circuit.HALF_OPEN and breaker.allows
    trial = breaker.begin()
    assert not breaker.allows  # one at a time
    breaker.end(trial, None)  # its client has left
    ask(breaker, True)
    assert breaker.state is Circuit.CLOSED and breaker.allows and breaker.opened == 1


def test_every_failed_trial_doubles_the_wait_up_to_a_limit() -> None:
    clock = Clock()
    breaker = Breaker(1, 10.0, clock=clock)
    ask(breaker, False)
    for times in (2, 4, 8, 8):
        clock.now += breaker.wait
        ask(breaker, False)
        assert breaker.wait == 10 * times and times <= MOST_TIMES
    clock.now += breaker.wait
    ask(breaker, True)
    ask(breaker, False)
    assert breaker.wait == 10


@pytest.mark.parametrize(("failures", "may"), [(0, True), (1, False)])
def test_a_circuit_that_may_not_open(failures: int, may: bool) -> None:
    breaker = Breaker(failures, 10.0, may_open=lambda: may)
    for _ in range(10):
        ask(breaker, False)
    assert breaker.state is Circuit.CLOSED


def test_the_budget_is_a_share_of_the_requests() -> None:
    clock = Clock()
    budget = RetryBudget(0.25, clock)
    assert [budget.take() for _ in range(int(FIRST) + 1)] == [True] * int(FIRST) + [False]
    for _ in range(8):
        budget.earn()
    assert [budget.take() for _ in range(3)] == [True, True, False] and budget.denied == 2
    clock.now += 1
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.now += 1e6
    assert sum(budget.take() for _ in range(200)) == MOST
    assert not RetryBudget(0.0, clock).take()


def test_drained_backends_are_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    assert RouterState(str(file)).keep(["http://b", "http://a"]) == ""
    assert RouterState(str(file)).draining == {"http://a", "http://b"}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    file.write_bytes(b"[1")
    with pytest.raises(ConfigError, match="--state-file .* remove it"):
        RouterState(str(file))
    with pytest.raises(ConfigError, match="its folder must be there, and writable"):
        RouterState(str(tmp_path / "no" / "state.json"))
    (tmp_path / "later").mkdir()
    state = RouterState(str(tmp_path / "later" / "state.json"))
    (tmp_path / "later").rmdir()
    assert state.keep(["x"]) == "No such file or directory"
    assert RouterState(None).keep(["x"]) == ""

"""The number of drafts by load and by measured gain, as a trace of steps; times are made up."""

from typing import Any

import numpy as np
import pytest

from quire.engine.drafts import PROBE, RENEW, DraftLength, MeasuredGain


class Device:
    """Steps of decodes: k drafts cost `cost` of a plain step each, and a draft is right with probability `right`."""

    def __init__(self, cost: float = 0.05, right: float = 0.8, lengths: tuple[int, ...] = (1, 3, 7)) -> None:
        self.now, self.cost, self.right = 0.0, cost, right
        self.gain = MeasuredGain(lengths, clock=lambda: self.now)
        self.random = np.random.default_rng(0)

    def steps(self, number: int, decodes: int = 4, most: int = 7, alone: bool = True) -> list[int]:
        """The numbers of drafts of so many steps."""
        trace = []
        for _ in range(number):
            k = self.gain.choose(decodes, most)
            trace.append(k)
            right = np.logical_and.accumulate(self.random.random((decodes, k)) < self.right, 1).sum(1)
            self.now += 1.0 + self.cost * k
            self.gain.observe(np.full(decodes, 1 + k, np.int32), (1 + right).astype(np.int32), alone=alone)
        return trace


@pytest.mark.parametrize(("cost", "right", "best"), [(0.02, 0.9, 7), (0.3, 0.5, 1), (0.6, 0.5, 0), (0.1, 0.7, 3)])
def test_the_number_with_the_most_tokens_per_second_is_found(cost: float, right: float, best: int) -> None:
    """Tokens of a run: 1 + right + right^2 + ...; seconds: 1 + cost k."""
    rates = {k: sum(right**i for i in range(k + 1)) / (1 + cost * k) for k in (0, 1, 3, 7)}
    assert max(rates, key=rates.__getitem__) == best
    trace = Device(cost, right).steps(400, decodes=64)
    assert trace[-300:].count(best) > 250


@pytest.mark.parametrize("decodes", [1, 4, 64])
@pytest.mark.parametrize(("cost", "right"), [(0.05, 0.8), (0.0, 1.0)])
def test_it_falls_to_none_within_16_steps_and_recovers(cost: float, right: float, decodes: int) -> None:
    device = Device(cost, right)
    before = device.steps(100, decodes)
    assert set(before[-50:]) <= {0, 1, 3, 7} and before[-50:].count(0) < 10
    device.right = 0.0
    fallen = device.steps(300, decodes)
    first = fallen.index(0)
    assert first <= 16 and sum(k > 0 for k in fallen[first + 16 :]) <= 1 + 284 // PROBE, fallen
    assert max(fallen[first + 16 :]) <= 1, "it tries with the shortest"
    device.right = 1.0
    again = device.steps(2 * PROBE + 10, decodes)
    assert sum(k > 0 for k in again[-10:]) >= 9, again


def test_drafts_that_cost_more_than_they_bring_stop() -> None:
    """Half a draft is right; a draft costs as much as a step."""
    trace = Device(cost=1.0, right=0.5).steps(300)
    assert sum(k > 0 for k in trace[40:]) <= 260 // PROBE + 1


def test_a_plain_step_renews_what_drafts_are_compared_with() -> None:
    trace = Device(right=0.9).steps(2 * RENEW + 10)
    assert 2 <= trace[10:].count(0) <= 4


def test_steps_with_prompts_and_pauses_are_no_measure() -> None:
    device = Device()
    device.steps(50)
    known = dict(device.gain._seconds)
    device.now += 1000.0
    assert device.steps(1, alone=False) and device.gain._seconds == known
    device.now += 1000.0
    device.steps(1)
    assert device.gain._seconds == known, "the step before had a prompt"
    device.now += 1000.0
    device.steps(1)
    assert device.gain._seconds == known, "something else took the time"


@pytest.mark.parametrize(("short", "cost", "best"), [(0, 0.02, 7), (7, 1.0, 0)])
def test_a_first_time_that_was_too_short_is_corrected(short: int, cost: float, best: int) -> None:
    """Two results that are taken together, after a pause of the host, seem to be of a step without duration."""
    device = Device(cost, right=0.9)
    device.gain._seconds[short, 3] = 1e-4
    trace = device.steps(300)
    assert trace[-200:].count(best) > 150 and device.gain._seconds[0, 3] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("decodes", "expected"), [(1, 3), (8, 3), (9, 1), (20, 1), (64, 1), (65, 0), (900, 0)])
def test_a_table_names_k_by_the_number_of_decodes(decodes: int, expected: int) -> None:
    assert DraftLength(3, ((1, 3), (9, 1), (65, 0))).choose(decodes) == expected


def test_a_table_bounds_what_is_measured() -> None:
    device = Device(cost=0.0, right=1.0)
    assert max(device.steps(50, most=3)) == 3 and set(device.steps(5, most=0)) == {0}


def test_auto_gives_the_tokens_of_plain_decoding(Rig: Any, depth: int) -> None:
    rig = Rig(depth, drafts=7, accepts=(3, 0, 7, 1), slots=4)
    rig.scheduler.drafts = DraftLength(7, (), (1, 3, 7))
    for i in range(4):
        rig.add([i, 1, 2], 40)
    rig.drain()
    for i in range(4):
        rig.judge(i)
    runs, drafts, *accepted = rig.scheduler.drafts.totals
    assert 0 < sum(accepted) < drafts and runs > 3

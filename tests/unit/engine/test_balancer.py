"""The balancer of experts: when it looks, what it tells the ranks, and what it does when nothing moves."""

import logging
from typing import Any

import numpy as np
import pytest

from quire.config.balancing import EplbConfig
from quire.engine.balancer import DEADLINE, Balancer
from quire.engine.eplb import balancedness, initial_map

from ...support.balancing import moving

LAYERS, EXPERTS, RANKS = 3, 8, 2
SETTINGS = EplbConfig(window_size=4, step_interval=8, num_redundant_experts=2)
HOT = np.tile([1, 1, 1, 1, 1, 50, 1, 1], (LAYERS, 1))


class Ranks:
    """Ranks that keep what they are asked for; each of two has counted half of `load`."""

    def __init__(self, load: Any = HOT) -> None:
        self.load, self.asked, self.moves = load, list[str](), list[dict[str, Any]]()

    def control(self, name: str, args: dict[str, Any]) -> object:
        assert name == "experts"
        self.asked.append(args["what"])
        if args["what"] == "move":
            self.moves.append(args)
        half = self.load // 2
        return [half.tolist(), (self.load - half).tolist()] if args["what"] == "load" else [None, None]


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(ranks: Ranks, clock: Time | None = None) -> Balancer:
    return Balancer(SETTINGS, initial_map(LAYERS, EXPERTS, 2, RANKS), ranks.control, clock=clock or Time())


def until_moving(balancer: Balancer, ranks: Ranks) -> None:
    for _ in range(1000):
        assert balancer.next_switch() == -1
        if balancer._planned is not None:
            balancer._planned.result(timeout=60)
        if ranks.moves:
            return
    raise AssertionError("nothing moves")


def test_counts_are_collected_over_the_window_and_every_layer_switches_once_all_ranks_have_it() -> None:
    ranks = Ranks()
    balancer = made(ranks)
    until_moving(balancer, ranks)
    assert ranks.asked == ["load", "move"], "the first look comes after a quarter of the interval, without a reset"
    old = balancer.experts
    assert balancer.balancedness == pytest.approx(balancedness(HOT, old)) and balancer.balancedness < 0.7
    assert [sum(layer) for layer in balancer.loads] == HOT.sum(axis=1).tolist() and len(balancer.loads[0]) == RANKS
    assert balancer.next_switch() == -1, "no rank has told that a layer has come"
    balancer.note(1)
    assert [balancer.next_switch() for _ in range(3)] == [0, -1, -1]
    balancer.note(3)
    assert balancer.experts is old
    assert [balancer.next_switch() for _ in range(2)] == [1, 2] and not moving(balancer)
    assert balancedness(HOT, balancer.experts) > 0.7
    told, new = ranks.moves[0], balancer.experts
    assert np.array_equal(told["slots"], new.slots) and np.array_equal(told["counts"], new.counts)
    for layer, steps in enumerate(told["moves"]):
        held = old.experts[layer].copy()
        for to, source in steps:
            held[to] = old.experts[layer][source]
        assert np.array_equal(held, new.experts[layer])
    balancer.close()


def test_the_second_look_follows_a_reset_of_the_counts() -> None:
    ranks = Ranks(np.zeros((LAYERS, EXPERTS), np.int64))
    balancer = made(ranks)
    for _ in range(2 + 16):
        assert balancer.next_switch() == -1
    assert ranks.asked == ["load", "reset", "load", "reset", "load"], "without tokens nothing is planned"
    assert not moving(balancer) and balancer.balancedness == 0
    balancer.close()


def test_results_of_an_earlier_map_switch_nothing() -> None:
    """The counts of results go on over maps."""
    ranks = Ranks()
    balancer = made(ranks)
    until_moving(balancer, ranks)
    balancer.note(LAYERS)
    assert [balancer.next_switch() for _ in range(3)] == [0, 1, 2]
    ranks.load = HOT[:, ::-1].copy()
    ranks.moves.clear()
    until_moving(balancer, ranks)
    balancer.note(LAYERS)  # a result that was on its way
    assert balancer.next_switch() == -1
    balancer.note(LAYERS + 1)
    assert balancer.next_switch() == 0
    balancer.close()


def test_a_mover_that_is_frozen_is_warned_about_once_and_the_old_map_serves(caplog: pytest.LogCaptureFixture) -> None:
    ranks, clock = Ranks(), Time()
    balancer = made(ranks, clock)
    until_moving(balancer, ranks)
    old = balancer.experts
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(100):
            clock.now += DEADLINE / 50
            assert balancer.next_switch() == -1
    assert len(caplog.records) == 1 and "0 of 3 layers have moved" in caplog.text and "old map" in caplog.text
    assert balancer.experts is old and ranks.asked == ["load", "move"], "no other map is made meanwhile"
    balancer.note(LAYERS)
    assert balancer.next_switch() == 0, "a mover that goes on is followed"
    balancer.close()


def test_layers_that_gain_little_stay_as_they_are() -> None:
    """The policy would move most weights for any load."""
    load = HOT.copy()
    load[1] = [10, 10, 10, 10, 12, 11, 10, 10]
    ranks = Ranks(load)
    balancer = made(ranks)
    until_moving(balancer, ranks)
    assert [bool(steps) for steps in ranks.moves[0]["moves"]] == [True, False, True]
    balancer.close()


def test_after_a_fault_of_the_policy_requests_are_served_as_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    balancer = made(ranks)
    monkeypatch.setattr("quire.engine.balancer.balanced_map", lambda *given, **named: 1 / 0)
    with caplog.at_level(logging.ERROR, "quire"):
        for _ in range(50):
            assert balancer.next_switch() == -1
            if balancer._planned is not None:
                balancer._planned.exception(timeout=60)
    assert caplog.text.count("no map could be made") == 1 and "ZeroDivisionError" in caplog.text
    assert ranks.asked == ["load"] and not moving(balancer)
    balancer.close()


def test_after_a_fault_of_a_mover_nothing_is_balanced_any_more(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    balancer = made(ranks)
    until_moving(balancer, ranks)
    with caplog.at_level(logging.ERROR, "quire"):
        balancer.note(-1)
        balancer.note(-1)
    assert len(caplog.records) == 1 and "not balanced any more" in caplog.text
    balancer.note(LAYERS)
    assert [balancer.next_switch() for _ in range(50)] == [-1] * 50 and ranks.asked == ["load", "move"]
    balancer.close()

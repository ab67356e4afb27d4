"""Every step says what it did and how things stand: what metrics show comes from here."""

from typing import Any

import pytest

from quire.engine import core, finish


def test_a_prompt_then_decodes(Rig: Any, depth: int) -> None:
    rig = Rig(depth=depth, budget=16)
    rig.add(range(20), 4)
    seen = []
    while rig.core.has_work:
        stats = rig.step().stats
        if stats.step >= 0:
            seen.append((stats.num_tokens, stats.num_prefill_tokens, stats.num_scheduled, stats.num_prefills))
    assert seen == [(16, 16, 1, 1), (4, 4, 1, 1), (1, 0, 1, 0), (1, 0, 1, 0), (1, 0, 1, 0)]


def test_prompts_and_decodes_in_one_step(Rig: Any) -> None:
    rig = Rig(budget=16)
    rig.add(range(5), 8)
    rig.step()
    rig.add(range(100, 107), 8)
    stats = rig.step().stats
    assert (stats.num_tokens, stats.num_prefill_tokens, stats.num_scheduled, stats.num_prefills) == (8, 7, 2, 1)


def test_those_behind_a_parents_prompt_are_told_from_those_without_room(Rig: Any) -> None:
    rig = Rig(slots=1, budget=4)
    parent = rig.add(range(12), 4)
    rig.add(range(12), 4, parent=parent)
    rig.add(range(50, 60), 4)
    stats = rig.step().stats
    assert (stats.num_running, stats.num_waiting, stats.num_blocked) == (1, 2, 1)


def test_blocks_are_held_then_cached(Rig: Any) -> None:
    rig = Rig(blocks=40, block_size=4)
    rig.add(range(10), 2)
    stats = rig.step().stats
    assert stats.num_free_blocks == 37 and stats.num_cached_blocks == 0
    stats = rig.step().stats
    assert stats.num_free_blocks == 40 and stats.num_cached_blocks == rig.pool.num_cached > 0


def test_an_abort_is_told_even_when_no_step_follows(Rig: Any, depth: int) -> None:
    rig = Rig(depth=depth)
    handle = rig.add(range(10), 8)
    rig.step(3)
    rig.abort(handle)
    last = rig.outputs.stats
    while rig.core.has_work:
        last = rig.step().stats
    assert last.num_running == 0 and last.num_free_blocks == rig.num_blocks


def test_a_request_dropped_before_any_step(Rig: Any) -> None:
    rig = Rig()
    rig.abort(rig.add(range(10), 8))
    stats = rig.step().stats
    assert stats.step == -1 and stats.num_waiting == stats.num_tokens == 0 and stats.num_free_blocks == rig.num_blocks


def test_the_time_of_each_part_is_told(Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only planning, the executor and publishing move."""
    rig, now = Rig(depth=depth, block_size=4), [0.0]
    for module in (core, finish):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def slow(owner: Any, name: str, seconds: float) -> None:
        whole = getattr(owner, name)

        def call(*args: Any) -> Any:
            now[0] += seconds
            return whole(*args)

        setattr(owner, name, call)

    slow(rig.scheduler, "plan", 4.0)
    slow(rig.mock, "submit", 2.0)
    slow(rig.mock, "collect", 1.0)
    slow(rig.core._finisher, "_confirm", 0.5)
    rig.add(range(4), 2)
    told = []
    while rig.core.has_work:
        told.append(rig.step().stats)
    told = [stats for stats in told if stats.step >= 0]
    assert [(s.schedule_s, s.execute_s, s.finish_s) for s in told] == [(4.0, 3.0, 0.5)] * 2

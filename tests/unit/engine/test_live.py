"""The live view: every frame is true, and nothing is recorded while nobody watches."""

import random
from typing import Any

import pytest

from quire.contracts.live import LiveEventKind as Kind
from quire.contracts.live import LiveStep
from quire.engine import core, live_recorder
from quire.kv.census import pool_map

from ...support.mock_copies import MockDisk

SHAPES: list[dict[str, Any]] = [
    {"depth": 2, "drafts": 3, "accepts": (2, 0, 3), "windows": (None, 5), "blocks": 16},
    {"depth": 2, "blocks": 12, "host_blocks": 12, "disk": MockDisk, "delays": (0, 3)},
    {"depth": 1, "blocks": 12, "states": 4},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_frames_agree_with_the_engine_over_a_random_run(Rig: Any, shape: dict[str, Any]) -> None:
    options = {name: value() if isinstance(value, type) else value for name, value in shape.items()}
    rig, chance = Rig(slots=4, vocab=7, budget=16, **options), random.Random(0)
    rig.watch()
    for _ in range(150):
        if chance.random() < 0.3:
            stem = [0] * chance.choice((0, 8, 16))
            length, fields = chance.randrange(1, 12), {"grammar": '{"regex":"[ab]*c"}'} if chance.random() < 0.1 else {}
            rig.add([*stem, *(chance.randrange(3) for _ in range(length))], chance.randrange(1, 16), **fields)
        if chance.random() < 0.05 and rig.core.handles:
            rig.abort(chance.choice(rig.core.handles))
        rig.step()
    rig.drain()
    told = {event.what for life in rig.watched.lives.values() for event in life}
    assert {Kind.ARRIVED, Kind.BLOCKED, Kind.QUEUED, Kind.ADMITTED, Kind.CHUNK, Kind.FINISHED} <= told
    assert Kind.PREEMPTED in told and rig.scheduler.num_preempted


def test_the_end_of_an_aborted_request_has_its_cause(Rig: Any) -> None:
    rig = Rig()
    rig.core.watch(True)
    for cause in ("queue_timeout", ""):
        rig.core.abort(rig.add(range(9), 4), cause)
    ends = [event.detail for event in rig.core.recorder.frame(0).events if event.what is Kind.FINISHED]
    assert ends == ["abort: queue_timeout", "abort"]


@pytest.mark.parametrize(
    ("lacks", "options"),
    [("slots", {"slots": 1}), ("blocks", {"slots": 4, "blocks": 4}), ("budget", {"slots": 4, "budget": 6})],
)
def test_a_frame_says_what_the_first_waiting_request_lacks(Rig: Any, lacks: str, options: dict[str, Any]) -> None:
    rig = Rig(**options)
    rig.core.watch(True)
    for first in (0, 20):
        rig.add(range(first, first + 9), 4)
    rig.step()
    queue = rig.core.recorder.frame(0).queue
    assert (queue.running, queue.waiting, queue.waits_for) == (1, 1, lacks)
    rig.drain()
    assert rig.core.recorder.frame(0).queue.waits_for == ""


def test_nothing_is_recorded_while_nobody_watches(Rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(core, "LiveRecorder", lambda *a: made.append("recorder") or live_recorder.LiveRecorder(*a))
    for name in ("LiveEvent", "KeptStep"):
        real = getattr(live_recorder, name)
        monkeypatch.setattr(live_recorder, name, lambda *a, real=real, **k: made.append(real.__name__) or real(*a, **k))
    rig = Rig(depth=2)
    rig.add(range(9), 4)
    rig.drain()
    assert made == []
    rig.core.watch(True)
    rig.add(range(9), 4)
    rig.step(3)
    rig.core.recorder.frame(0)
    assert made[0] == "recorder" and {"LiveEvent", "KeptStep"} <= {*made}
    rig.core.watch(False)
    made.clear()
    rig.drain()
    assert made == [] and rig.core.recorder is None


def test_a_watch_that_begins_in_the_middle_knows_what_comes(Rig: Any) -> None:
    rig = Rig(depth=2)
    rig.add(range(9), 8)
    rig.step(2)
    rig.core.watch(True)
    rig.step(2)
    frame = rig.core.recorder.frame(0)
    assert frame.requests.handle == [0] and frame.steps and not frame.events
    rig.drain()
    assert [event.what for event in rig.core.recorder.frame(0).events] == [Kind.FINISHED]


def test_more_steps_than_a_frame_shows_are_summed_up(Rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_recorder, "MOST_STEPS", 3)
    monkeypatch.setattr(live_recorder, "MOST_WAITING", 1)
    rig = Rig(slots=1)
    rig.core.watch(True)
    for _ in range(3):
        rig.add(range(4), 8)
    rig.step(6)
    frame = rig.core.recorder.frame(0)
    assert [step.step for step in frame.steps] == [3, 4, 5] and frame.skipped == 3
    assert (frame.sums.steps, frame.sums.tokens, frame.sums.sampled) == (6, 9, 6)
    assert frame.requests.handle == [0, 1] and frame.requests.more == 1 and frame.queue.waiting == 2
    rig.drain()


def test_a_step_tells_its_chunks_and_whether_it_samples_behind_them(Rig: Any) -> None:
    rig = Rig(budget=8)
    rig.core.watch(True)
    rig.add(range(12), 2)
    rig.step(3)
    steps: list[LiveStep] = rig.core.recorder.frame(0).steps
    assert [step.chunks for step in steps] == [((0, 0, 8, 0),), ((0, 8, 4, 1),), ()]
    assert [step.decodes for step in steps] == [0, 0, 1]
    rig.drain()


def test_misses_are_counted_by_reason(Rig: Any) -> None:
    rig = Rig(block_size=4)
    rig.core.watch(True)
    for prompt in (range(9), range(9), (0, 1, 2, 3, 9, 9, 9, 9, 9)):
        rig.add(prompt, 1)
        rig.drain()
    prefix = rig.core.recorder.frame(0).prefix
    assert {why: (one.requests, one.blocks) for why, one in prefix.misses.items()} == {"new": (1, 2), "tokens": (1, 1)}
    assert (prefix.queries, prefix.hits) == (27, 12)


def test_letters_of_a_map(Rig: Any) -> None:
    rig = Rig(blocks=6, block_size=4)
    rig.add(range(9), 1)
    rig.drain()
    rig.add(range(8), 8)
    rig.add([*range(8), 7], 8)
    rig.step()
    assert pool_map(rig.pool) == "sooo.."
    rig.drain()
    assert set(pool_map(rig.pool)) == {"c", "."}

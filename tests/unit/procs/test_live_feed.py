"""Frames of the live view: made for those who ask, at most ten a second; when nobody asks, recording ends."""

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.live import BlockMap, LiveFrame
from quire.contracts.request import Account, NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.core import EngineCore
from quire.engine.mock_core import build_mock_core
from quire.procs import live_feed
from quire.procs.block_map import block_map
from quire.procs.core_server import serve_core
from quire.procs.live_feed import INTERVAL, LEASE, LiveFeed
from quire.procs.messages import Add, Control, FromCore, NextFrame, Outputs, Reply, Stop, ToCore, Watched
from quire.procs.wire import FROM_CORE, encode

from ...support.replica_rig import ReplicaRig


def new(handle: int, tokens: int = 4, tenant: str = "") -> NewRequest:
    ids = array("I", [handle + 1, 2, 3]).tobytes()
    sampler = SamplerSpec(seed=handle, num_prompt=3)
    return NewRequest(
        handle=handle,
        request_id=f"r{handle}",
        token_ids=ids,
        max_tokens=tokens,
        sampler=sampler,
        account=Account(tenant),
    )


@pytest.fixture(autouse=True)
def frames_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of the processor: on a busy machine a frame would take long enough to make the next one rarer."""
    monkeypatch.setattr(live_feed.time, "thread_time", lambda: 0.0)


class Feed:
    """A feed of a mock core, with a clock that a test moves; `sent` has its frames."""

    def __init__(self, core: Any = None) -> None:
        self.core: Any = core or build_mock_core(EngineConfig.from_flat(device="mock"), bundled_model())
        self.now, self.sent = 0.0, list[Watched]()
        self.feed = LiveFeed(self.core, self.sent.append, lambda: self.now)  # type: ignore[arg-type]

    def after(self, seconds: float) -> list[Watched]:
        """Let time pass, and take what the feed tells then."""
        self.now += seconds
        if self.feed.active:
            self.feed.tell()
        sent, self.sent[:] = list(self.sent), []
        return sent


def serve(core: EngineCore, *messages: ToCore) -> list[FromCore]:
    """Run the core's loop over the messages, until it has nothing to do. Return what it says."""
    waiting, said = [*messages], list[FromCore]()
    serve_core(core, lambda wait: waiting.pop(0) if waiting else Stop() if wait else None, said.append)
    return said


def test_without_a_watcher_no_frame_is_made_and_nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed()
    monkeypatch.setattr(live_feed.LiveFeed, "tell", lambda self: pytest.fail("a frame was looked for"))
    said = serve(feed.core, Add((new(0),)))
    assert any(isinstance(one, Outputs) for one in said) and not any(isinstance(one, Watched) for one in said)
    assert feed.core.recorder is None and not feed.core._roster.on_move and not feed.core._finisher.on_end


def test_the_loop_tells_a_watcher_at_once() -> None:
    said = serve(Feed().core, NextFrame(0), Add((new(0),)))
    assert [one.places for one in said if isinstance(one, Watched)] == [(0,)]


def test_one_frame_for_each_that_asked_and_ten_a_second() -> None:
    feed = Feed()
    feed.feed.ask(0)
    assert [one.places for one in feed.after(0.0)] == [(0,)]
    feed.feed.ask(0)
    feed.feed.ask(2)
    assert feed.after(INTERVAL / 2) == []
    (second,) = feed.after(INTERVAL)
    assert second.places == (0, 2) and second.frame.frame == 2
    assert second.frame.seconds == pytest.approx(1.5 * INTERVAL)
    assert feed.after(1.0) == [], "nobody has asked again: a reader that does not read costs one frame"


def test_frames_become_rarer_when_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, spent = Feed(), [0.0]
    monkeypatch.setattr(live_feed.time, "thread_time", lambda: spent.__setitem__(0, spent[0] + 0.004) or spent[0])
    for _ in range(8):
        feed.feed.ask(0)
        feed.after(LEASE - 1.0)
    feed.feed.ask(0)
    assert len(feed.after(0.0)) == 1
    feed.feed.ask(0)
    assert feed.after(1.2) == [] and len(feed.after(0.2)) == 1  # 4 ms are 0.3% of 1.33 s


def test_recording_ends_when_nobody_asks() -> None:
    feed = Feed()
    feed.feed.ask(0)
    feed.after(0.0)
    assert feed.core.recorder is not None
    feed.after(LEASE / 2)
    assert feed.feed.active
    feed.after(LEASE)
    assert not feed.feed.active and feed.core.recorder is None and not feed.core._roster.on_move
    feed.feed.ask(1)
    (first,) = feed.after(0.0)
    assert first.frame.frame == 1


def test_a_frame_crosses_to_another_process_as_it_is() -> None:
    feed = Feed()
    feed.feed.ask(0)
    feed.after(0.0)
    for handle in range(3):
        feed.core.add(new(handle, tenant="t" * (handle == 1)))
    feed.core.step()
    feed.feed.ask(0)
    (told,) = feed.after(1.0)
    assert isinstance(told.frame, LiveFrame) and told.frame.tenants == {1: "t"}
    (engine,) = told.frame.engines
    assert engine.queue.running == 3 and engine.requests.id == ["r0", "r1", "r2"] and len(engine.events) == 6 + 3
    assert FROM_CORE.decode(encode(told)) == told


def test_replicas_are_told_apart_and_a_dead_one_is_left_out() -> None:
    rig = ReplicaRig(2, lockstep=False)
    feed = Feed(rig.core)
    feed.feed.ask(0)
    (first,) = feed.after(0.0)
    assert [one.replica for one in first.frame.engines] == [0, 1]
    rig.core._bury(rig.core.cores[0], RuntimeError("planted"))
    feed.feed.ask(0)
    (second,) = feed.after(1.0)
    assert [one.replica for one in second.frame.engines] == [1]


def test_loads_of_experts_come_when_they_are_new_and_in_every_tenth_frame() -> None:
    feed = Feed(ReplicaRig(2, lockstep=True).core)
    feed.core.balancer = balancer = SimpleNamespace(loads=[], balancedness=0.0)
    told = []
    for number in range(1, 21):
        if number in (2, 5):
            balancer.loads, balancer.balancedness = [[number, 1]], 0.5
        feed.feed.ask(0)
        (one,) = feed.after(INTERVAL)
        told.append(None if one.frame.experts is None else one.frame.experts.loads)
    assert {number: loads for number, loads in enumerate(told, 1) if loads} == {
        2: [[2, 1]],
        5: [[5, 1]],
        10: [[5, 1]],
        20: [[5, 1]],
    }


def test_the_map_of_blocks_has_their_owners() -> None:
    core = Feed().core
    said = serve(core, Add((new(0, tenant="t"), new(1))), Control(1, "blocks"))
    (reply,) = [one for one in said if isinstance(one, Reply)]
    assert reply.error is None
    core.add(new(2, tenant="t"))
    core.step()
    (engine,) = msgspec.json.decode(block_map(core), type=BlockMap).engines
    (owner,) = engine.owners
    assert (owner.id, owner.tenant, owner.tables) == ("r2", "t", [core.scheduler.allocator.table(owner.slot)])
    assert len(engine.device) == core.facts.num_blocks
    assert all(engine.device[block - 1] == "o" for block in owner.tables[0])

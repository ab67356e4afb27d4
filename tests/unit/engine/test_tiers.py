"""Blocks that leave the device and come back, on the mock: what is computed again, and what goes wrong and may not."""

from array import array
from typing import Any

import pytest

from quire.contracts.request import BlockReason, RequestState, Transfer
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kv.hashing import KeyChain
from quire.kv.store import FETCH_SECONDS, REPORT_SECONDS
from quire.kv.tiered_pool import MOST_MOVING

from ...support.mock_copies import MockDisk, MockPeers

PROMPT = [1, 2, 3] * 8  # six blocks of four tokens
OTHERS = [[i] * 32 for i in range(5, 9)]
COMPUTED = 4  # of PROMPT at least: its last block, for the logits of its last token
SIZES = {"blocks": 12, "slots": 2, "host_blocks": 60, "write_through": True}


def evicted(rig: Any, **first: Any) -> Any:
    """The rig after PROMPT was answered and its blocks left the device."""
    for prompt in (PROMPT, *OTHERS):
        rig.add(prompt, 4, **first)
        rig.drain()
        first = {}
    assert rig.allocator.match(chain(rig), 24).num_tokens == 0
    return rig


def chain(rig: Any) -> Any:
    """The keys of PROMPT."""
    return KeyChain(bytes(32), rig.block_size, array("I", PROMPT))


def again(rig: Any, **fields: Any) -> int:
    handle = rig.add(PROMPT, 4, **fields)
    rig.drain().judge(handle)
    return int(handle)


@pytest.mark.parametrize("write_through", [True, False])
def test_what_was_loaded_is_not_computed(Rig: Any, depth: int, write_through: bool) -> None:
    rig = evicted(Rig(depth, **SIZES | {"write_through": write_through}))
    handle = again(rig)
    assert rig.cached[handle] == len(PROMPT) - COMPUTED
    assert rig.mock.computed[str(handle)] == COMPUTED + 3, "the prompt less what was loaded, and three outputs"
    assert rig.origins[handle] == dict.fromkeys(range(5), Tier.HOST) and rig.reasons[handle] == {"evicted"}
    stats = rig.outputs.stats.tiers[Tier.HOST]
    assert stats.num_loaded == 5 and stats.num_stored >= 5 and stats.loaded_bytes == 40


@pytest.mark.parametrize("delays", [[0], [2]])
def test_a_long_prompt_is_stored_whole(Rig: Any, depth: int, delays: list[int]) -> None:
    """It has more blocks than may move at a time, and all of them are computed in one step."""
    rig = Rig(
        depth, blocks=1300, block_size=1, budget=1300, max_len=1300, host_blocks=1300, write_through=True, delays=delays
    )
    prompt = list(range(2 * MOST_MOVING + 100))
    rig.add(prompt, 1)
    rig.drain()
    keys = KeyChain(bytes(32), 1, array("I", prompt)).keys(len(prompt))
    assert len(rig.plans) < 20 and sum(rig.store.host.lookup(key) is None for key in keys) == 0


def test_blocks_of_a_disk_come_through_the_host(Rig: Any, depth: int) -> None:
    disk = MockDisk()
    evicted(Rig(depth, **SIZES, disk=disk))
    rig = Rig(depth, **SIZES, disk=disk)  # after a restart
    handle = again(rig)
    assert rig.cached[handle] == 20 and rig.origins[handle] == dict.fromkeys(range(5), Tier.DISK)
    assert rig.reasons[handle] == {""}, "this engine has not had them"
    assert {tier: stats.num_loaded for tier, stats in rig.outputs.stats.tiers.items()} == {"host": 5, "disk": 5}
    assert again(rig) and rig.outputs.stats.tiers[Tier.DISK].num_loaded == 5, "now they are on the device"


@pytest.mark.parametrize(("faults", "cached"), [([""], 20), (["lost"], 0), (["half", ""], 8), (["corrupt", ""], 16)])
def test_blocks_of_a_peer_are_read_and_never_written(Rig: Any, depth: int, faults: list[str], cached: int) -> None:
    disk = MockDisk()
    evicted(Rig(depth, **SIZES, disk=disk))
    peers = MockPeers(disk)
    rig = Rig(depth, **SIZES, peers=peers, faults=faults, delays=[0, 3])
    handle = again(rig)
    assert rig.cached[handle] == cached and set(rig.origins.get(handle, {}).values()) <= {Tier.PEER}
    assert rig.mock.computed[str(handle)] == len(PROMPT) - cached + 3
    for prompt in OTHERS:
        rig.add(prompt, 4)
    rig.drain()
    assert peers.keys() <= disk.keys() and rig.outputs.stats.tiers[Tier.PEER].num_stored == 0


@pytest.mark.parametrize(("fields", "kept"), [({}, 6), ({"fail_after": 0}, 0), ({"stop_ids": tuple(range(1000))}, 6)])
def test_blocks_for_another_engine_are_kept_when_the_prompt_is_whole(
    Rig: Any, depth: int, fields: dict[str, Any], kept: int
) -> None:
    rig = Rig(depth, **SIZES)
    handle = rig.add(PROMPT, 1, transfer=Transfer(name="a"), **fields)
    aborted = rig.add(OTHERS[0], 9, transfer=Transfer(name="b"))
    rig.step(3)
    rig.abort(aborted)
    rig.step(12)
    assert rig.finish.keys() == {handle, aborted} and len(rig.store.sharing.held()) == kept
    assert rig.store.sharing._leases.keys() == ({"a"} if kept else set())
    rig.store.sharing.told.put(("a", False))
    rig.add(OTHERS[1], 2)
    rig.drain()


@pytest.mark.parametrize(("fault", "cached"), [("lost", 0), ("half", 8)])
def test_a_load_that_fails_leaves_what_is_valid(Rig: Any, depth: int, fault: str, cached: int) -> None:
    rig = evicted(Rig(depth, **SIZES))
    rig.mock._copies._faults = iter([fault] + [""] * 99)
    handle = again(rig)
    assert rig.cached[handle] == cached and set(rig.origins.get(handle, {})) == set(range(cached // 4))
    assert rig.outputs.stats.tiers[Tier.HOST].num_failed == 5 - cached // 4
    assert rig.mock.computed[str(handle)] == len(PROMPT) - cached + 3


def test_a_corrupt_block_of_a_disk_is_computed_and_written_again(Rig: Any, depth: int) -> None:
    disk = MockDisk()
    evicted(Rig(depth, **SIZES, disk=disk))
    rig = Rig(depth, **SIZES, disk=disk, faults=["corrupt"] + [""] * 50)
    assert rig.cached[again(rig)] == 16 and rig.outputs.stats.tiers[Tier.DISK].num_failed == 1
    rig = Rig(depth, **SIZES, disk=disk)
    assert rig.cached[again(rig)] == 20


def test_two_requests_wait_for_one_load(Rig: Any, depth: int) -> None:
    rig = evicted(Rig(depth, **SIZES, delays=[3]))
    before = rig.outputs.stats.tiers[Tier.HOST].num_loaded
    handles = [rig.add(PROMPT, 4) for _ in range(2)]
    rig.step(2)
    assert [rig.request(handle).blocked_on for handle in handles] == [BlockReason.REMOTE_KV] * 2
    rig.drain()
    for handle in handles:
        rig.judge(handle)
        assert rig.cached[handle] == 20
    assert rig.outputs.stats.tiers[Tier.HOST].num_loaded == before + 5


def test_others_run_while_a_request_waits(Rig: Any, depth: int) -> None:
    rig = evicted(Rig(depth, **SIZES, delays=[40]))
    waits, runs = rig.add(PROMPT, 4), rig.add([4, 4, 4], 4)
    rig.step(12)
    assert runs in rig.finish and rig.request(waits).state is RequestState.BLOCKED
    rig.drain().judge(waits)


def test_an_abort_ends_the_wait_and_not_the_load(Rig: Any, depth: int) -> None:
    rig = evicted(Rig(depth, **SIZES, delays=[6]))
    handle = rig.add(PROMPT, 4)
    rig.step(2)
    rig.abort(handle)
    assert not rig.store._fetches and rig.store.held(), "the blocks are written still"
    rig.drain()
    assert again(rig) and rig.cached[max(rig.cached)] == 20


def test_a_load_that_takes_too_long_is_not_waited_for(Rig: Any, depth: int) -> None:
    rig = evicted(Rig(depth, **SIZES, delays=[60]))
    handle = rig.add(PROMPT, 4)
    rig.step(3)
    rig.now += FETCH_SECONDS
    rig.step(8)
    rig.drain().judge(handle)
    assert rig.cached[handle] == 0 and rig.mock.computed[str(handle)] == len(PROMPT) + 3


def test_a_reset_empties_all_tiers(Rig: Any, depth: int) -> None:
    disk = MockDisk()
    rig = evicted(Rig(depth, **SIZES, disk=disk, delays=[0, 4]))
    rig.add(PROMPT, 4)
    rig.step(2)  # copies are under way
    rig.core.reset_prefix_cache()
    assert not disk
    rig.drain()
    disk.clear()  # of what was computed since
    rig.core.reset_prefix_cache()
    assert rig.cached[again(rig)] == 0


def test_blocks_of_a_failed_request_are_in_no_tier(Rig: Any, depth: int) -> None:
    disk = MockDisk()
    rig = Rig(depth, **SIZES | {"slots": 1}, disk=disk, delays=[1])
    failed = rig.add(PROMPT, 8, fail_after=5)
    rig.drain()
    assert rig.finish[failed].error == "nan_logits"
    assert not disk and not rig.store.host._index
    assert rig.cached[again(rig)] == 0


def test_a_request_that_fails_distrusts_what_it_loaded(Rig: Any, depth: int) -> None:
    disk = MockDisk()
    rig = evicted(Rig(depth, **SIZES, disk=disk))
    failed = rig.add(PROMPT, 4, fail_after=0)
    rig.drain()
    assert rig.finish[failed].error == "nan_logits" and rig.cached.get(failed) in (20, None)
    assert not any(rig.store.host.lookup(key) or disk.has(key) for key in chain(rig).keys(6))
    assert rig.cached[again(rig)] == 0


def test_a_preempted_request_loads_what_it_had(Rig: Any, depth: int) -> None:
    rig = Rig(depth, **SIZES | {"blocks": 10, "slots": 3, "host_blocks": 90})
    handles = [rig.add([i] * 12, 20) for i in range(3)]
    rig.drain()
    assert rig.scheduler.num_preempted
    for handle in handles:
        rig.judge(handle)
    assert rig.outputs.stats.tiers[Tier.HOST].num_loaded > 0


def test_a_full_disk_is_said_once(Rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(1, **SIZES, disk=MockDisk(), faults=["", "full"])
    evicted(rig)
    assert [record.message for record in caplog.records] == [
        "the disk tier takes no more blocks: no space left. It still gives those that it has. "
        "It is tried again after 60 s."
    ]


def test_blocks_in_a_tier_smaller_than_the_reserve_do_not_drive_each_other_out(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=30, host_blocks=2, reserve=20)
    for prompt in OTHERS:
        rig.add(prompt, 2)
    rig.drain(limit=200)


def test_stores_that_always_fail_are_not_tried_for_ever(Rig: Any, depth: int) -> None:
    rig = Rig(depth, **SIZES, faults=["lost"])
    rig.add(PROMPT, 4)
    rig.drain(limit=60)
    assert rig.outputs.stats.tiers[Tier.HOST].num_failed


def test_a_slow_disk_keeps_no_engine_busy(Rig: Any, depth: int) -> None:
    """Writes end by themselves; what came of them is applied with the next step, or when the engine is closed."""
    rig = Rig(depth, **SIZES, disk=MockDisk(), delays=[0, 0, 100, 100, 100, 100])
    rig.add(PROMPT, 4)
    while rig.core.has_work:
        rig.step()
    writes = [
        job for plan in rig.plans if plan.copies is not None for job in plan.copies.after if job.target == Tier.DISK
    ]
    assert writes and len(rig.plans) < 30 and rig.store.busy(writes=True)
    assert rig.finish, "the request has ended"
    for _ in range(3):
        rig.now += REPORT_SECONDS
        assert rig.core.has_work, "the host blocks of writes that have ended come back"
        while rig.core.has_work:
            rig.step()
    assert len(rig.plans) < 40
    flush(rig.core)
    assert not rig.store.busy(writes=True) and rig.core.state().stats.tiers[Tier.DISK].num_stored >= 6

"""Layers that keep states: the mock notices a request that goes on with another state than that of its tokens."""

from array import array
from typing import Any

import pytest

from quire.config.checkpoints import CheckpointPlaces
from quire.contracts.request import Transfer
from quire.contracts.step import Tier
from quire.kv.hashing import KeyChain
from quire.kv.states import StateCheckpoints

from ...support.mock_copies import MockDisk, MockPeers


def run(rig: Any, prompt: Any, max_tokens: int, **more: Any) -> int:
    """Run a request alone, and judge it."""
    handle: int = rig.add(prompt, max_tokens, **more)
    rig.drain()
    rig.judge(handle)
    return handle


def copies(rig: Any) -> list[tuple[int, int]]:
    """Return (slot, length) of every copy to a checkpoint, in order."""
    plans = [plan.features.states for plan in rig.plans if plan.features.states is not None]
    return [(slot, length) for states in plans for slot, length, _ in states.kept.tolist()]


def test_a_turn_goes_on_where_the_one_before_it_ended(Rig: Any, depth: int) -> None:
    """Places are every 4 tokens, copies of decodes every 8."""
    rig = Rig(depth, states=8, budget=64)
    first = run(rig, range(18), 15)
    assert copies(rig) == [(0, 16), (0, 24), (0, 32)] and rig.cached[first] == 0
    text = [*range(18), *rig.tokens[first]]
    assert rig.cached[run(rig, [*text, 7, 8, 9], 3)] == 32
    assert rig.cached[run(rig, range(18), 1)] == 16  # the last token is computed
    assert rig.cached[run(rig, range(15), 1)] == 0  # its blocks are there, and no state
    prefix = rig.outputs.stats.prefix
    assert (prefix.hits, prefix.states.hits, prefix.states.cut) == (48, 48, 12)
    assert (prefix.states.taken, prefix.states.num_checkpoints, prefix.states.num_used) == (3, 8, 3)


def test_the_next_request_goes_on_where_two_prompts_part(Rig: Any, depth: int) -> None:
    rig, same = Rig(depth, states=8, budget=64), list(range(21))
    cached = [rig.cached[run(rig, [*same, 100 + i, *range(40, 50)], 2)] for i in range(4)]
    assert cached == [0, 0, 20, 20]


def test_chunks_of_a_prompt_take_the_same_copies(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, budget=5)
    run(rig, range(18), 1)
    assert copies(rig) == [(0, 16)]


def test_a_copy_is_not_found_before_its_step_has_run(Rig: Any) -> None:
    """Both prompts are planned before the first result comes."""
    rig = Rig(2, states=8, budget=18)
    first, second = rig.add(range(18), 2), rig.add(range(18), 2)
    rig.drain()
    rig.judge(first)
    rig.judge(second)
    assert (rig.cached[first], rig.cached[second]) == (0, 0)
    assert rig.cached[run(rig, range(18), 2)] == 16


def test_further_completions_wait_for_the_state_of_the_prompt(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, budget=32)
    parent = rig.add(range(18), 6)
    children = [rig.add(range(18), 6, parent=parent, seed=9 + i) for i in range(2)]
    rig.drain()
    for handle in (parent, *children):
        rig.judge(handle)
    assert [rig.cached[handle] for handle in (parent, *children)] == [0, 16, 16]


def test_a_preempted_request_goes_on_at_its_last_copy(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, blocks=13, budget=16)
    handles = [rig.add(range(i, i + 9), 24) for i in range(2)]
    rig.drain()
    for handle in handles:
        rig.judge(handle)
    assert rig.scheduler.num_preempted
    again = [one for plan in rig.plans[1:] for one in plan.admitted if one.num_computed]
    assert again and all(one.num_computed >= 8 for one in again)


@pytest.mark.parametrize("fail_after", [0, 9])
def test_a_failed_request_leaves_no_state(Rig: Any, depth: int, fail_after: int) -> None:
    rig = Rig(depth, states=8, budget=64)
    failed = rig.add(range(18), 20, fail_after=fail_after)
    rig.drain()
    assert rig.finish[failed].reason == "error"
    assert rig.cached[run(rig, range(18), 1)] == 0


@pytest.mark.parametrize("accepts", [(0,), (3,), (2, 0, 1), (1, 3, 0, 0, 2)], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_turns_with_drafts_go_on_at_sound_copies(Rig: Any, depth: int, accepts: tuple[int, ...], cached: bool) -> None:
    """A step that passes a length may do so with drafts that are rejected. `cached`: the drafter has KV in blocks."""
    rig = Rig(depth, states=8, budget=64, drafts=3, accepts=accepts, drafts_cached=cached)
    text, found = list(range(10)), list[int]()
    for turn in range(4):
        handle = run(rig, text, 17 + turn)
        found.append(rig.cached[handle])
        text = [*text, *rig.tokens[handle], 7, 8]
    assert found[0] == 0 and all(one >= 8 for one in found[1:]) and found[3] > 40


def test_a_copy_is_asked_for_until_it_is_surely_there(Rig: Any) -> None:
    """With 5, 6 and 7 tokens the step may pass 8, and with 12 to 15 it may pass 16."""
    rig = Rig(1, states=8, budget=64, drafts=3, accepts=(0,))
    run(rig, range(5), 12)
    assert copies(rig) == [(0, 4), *[(0, 8)] * 3, *[(0, 16)] * 4]


def test_a_length_that_an_earlier_step_may_have_passed_is_left_out() -> None:
    """A plan that may pass 8 and 16 asks for 8 again. The next one may be behind 16, and asks for neither."""
    states, chain = StateCheckpoints(4, 4, 8), KeyChain(bytes(32), 4, array("I", range(30)))

    def asked(least: int, before: int, after: int) -> list[int]:
        return [one.length for one in states.of_decode(0, 0, chain, least, before, after)]

    assert [asked(5, 7, 10), asked(7, 10, 17), asked(11, 17, 20), asked(17, 22, 24)] == [[8], [8], [], [24]]
    states.leave(0, chain, 23)  # the copy may hold the state at 24
    assert states.find(chain, 30) == (0, 0)


@pytest.mark.parametrize(("computed", "found"), [(10, 0), (11, 8)])
def test_a_copy_is_found_if_the_states_of_a_draft_model_reach_it(computed: int, found: int) -> None:
    """They may be three tokens behind."""
    states, chain = StateCheckpoints(4, 4, 8, 3), KeyChain(bytes(32), 4, array("I", range(30)))
    assert [one.length for one in states.of_decode(0, 0, chain, 5, 5, 9)] == [8]
    states.leave(0, chain, computed)
    assert states.find(chain, 30)[0] == found


def test_a_request_that_ends_before_its_copy_leaves_none(Rig: Any, depth: int) -> None:
    """Drafts may pass 8 in each step, but the answer stops at the eighth token, whose state nobody computes."""
    drafts: dict[str, Any] = {"states": 8, "budget": 64, "drafts": 3, "accepts": (0,)}
    known, rig = Rig(depth, **drafts), Rig(depth, **drafts)
    tokens = known.tokens[run(known, range(5), 12)]
    first = run(rig, range(5), 12, stop_ids=(tokens[2],))
    assert rig.tokens[first] == tokens[:3] and (0, 8) in copies(rig)
    assert rig.cached[run(rig, [*range(5), *tokens, 7], 1)] == 4


def test_requests_with_drafts_are_preempted_and_go_on(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, blocks=13, budget=16, drafts=3, accepts=(1, 0, 3))
    handles = [rig.add(range(i, i + 9), 24) for i in range(2)]
    rig.drain()
    for handle in handles:
        rig.judge(handle)
    assert rig.scheduler.num_preempted


def test_without_a_free_checkpoint_none_is_made(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=1, budget=64, slots=4, blocks=80)
    handles = [rig.add(range(i, i + 10), 20) for i in range(4)]
    rig.drain()
    for handle in handles:
        rig.judge(handle)


def test_an_emptied_cache_has_no_checkpoints(Rig: Any) -> None:
    rig = Rig(states=8, budget=64)
    run(rig, range(18), 1)
    rig.core.reset_prefix_cache()
    assert rig.cached[run(rig, range(18), 1)] == 0


@pytest.mark.parametrize(
    ("places", "taken", "cached"),
    [
        (CheckpointPlaces(), [16, 24, 32], 32),
        (CheckpointPlaces(prompt=False), [24, 32], 32),
        (CheckpointPlaces(turn=False), [16], 16),
        (CheckpointPlaces(turn=False, every=6), [8, 16], 16),  # multiples of 6 are no places: 8 is the next one
        (CheckpointPlaces(prompt=False, branch=False, turn=False), [], 0),
    ],
    ids=str,
)
def test_copies_are_taken_where_they_are_asked_for(
    Rig: Any, depth: int, places: CheckpointPlaces, taken: list[int], cached: int
) -> None:
    rig = Rig(depth, states=8, budget=64, places=places)
    first = run(rig, range(18), 15)
    assert [length for _, length in copies(rig)] == taken
    text = [*range(18), *rig.tokens[first]]
    assert rig.cached[run(rig, [*text, 7, 8, 9], 3)] == cached


def test_a_step_takes_the_last_of_many_places(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, budget=20, places=CheckpointPlaces(prompt=False, turn=False, every=4))
    run(rig, range(35), 1)
    assert copies(rig) == [(0, 16), (0, 20), (0, 28), (0, 32)]


TIERED: dict[str, Any] = {"states": 2, "blocks": 12, "slots": 1, "budget": 64, "host_blocks": 60, "host_states": 20}


@pytest.mark.parametrize("write_through", [False, True])
def test_a_checkpoint_comes_back_with_its_blocks(Rig: Any, depth: int, write_through: bool) -> None:
    rig = Rig(depth, **TIERED, write_through=write_through)
    for first in (0, 100, 200, 300):
        run(rig, range(first, first + 30), 5)
    before = rig.outputs.stats.prefix.states.tiers[Tier.HOST]
    assert before.num_stored >= 4 and before.num_loaded == 0 and rig.states.pool.num_cached <= 2
    assert rig.cached[run(rig, range(30), 5)] == 28
    after = rig.outputs.stats.prefix.states.tiers[Tier.HOST]
    assert after.num_loaded == 1 and rig.outputs.stats.tiers[Tier.HOST].num_loaded == 7


def test_blocks_on_the_device_wait_for_a_checkpoint_in_host_memory(Rig: Any, depth: int) -> None:
    rig = Rig(depth, **TIERED | {"blocks": 60, "states": 1}, write_through=True)
    run(rig, range(30), 1)
    run(rig, range(100, 130), 1)
    assert rig.cached[run(rig, range(30), 1)] == 28
    assert rig.outputs.stats.tiers[Tier.HOST].num_loaded == 0, "all blocks were on the device"


def test_blocks_without_a_checkpoint_in_any_tier_are_left_there(Rig: Any, depth: int) -> None:
    rig = Rig(depth, **TIERED | {"host_states": 1}, write_through=True)
    for first in (0, 100, 200, 300):
        run(rig, range(first, first + 30), 5)
    loaded = rig.outputs.stats.tiers[Tier.HOST].num_loaded
    assert rig.cached[run(rig, range(30), 5)] == 0
    assert rig.outputs.stats.tiers[Tier.HOST].num_loaded == loaded


def test_checkpoints_of_a_disk_outlive_the_engine(Rig: Any, depth: int) -> None:
    disks = {"disk": MockDisk(), "state_disk": MockDisk()}
    run(Rig(depth, **TIERED, write_through=True, **disks), range(30), 5)
    rig = Rig(depth, **TIERED, **disks)
    assert rig.cached[run(rig, range(30), 5)] == 28
    assert rig.outputs.stats.prefix.states.tiers[Tier.DISK].num_loaded == 1


@pytest.mark.parametrize("faults", [["lost"], ["half"], ["corrupt"]])
def test_a_checkpoint_that_fails_to_come_is_computed(Rig: Any, depth: int, faults: list[str]) -> None:
    rig = Rig(depth, **TIERED, write_through=True)
    for first in (0, 100, 200, 300):
        run(rig, range(first, first + 30), 5)
    rig.mock._state_copies._faults = iter(faults + [""] * 99)
    assert rig.cached[run(rig, range(30), 5)] == (28 if faults == ["corrupt"] else 0)


def test_no_load_overwrites_a_checkpoint_that_a_request_of_the_same_step_goes_on_at(Rig: Any, depth: int) -> None:
    """The only checkpoint is that of the first request; the second one's would have to take its place."""
    rig = Rig(depth, **TIERED | {"states": 1, "slots": 2, "blocks": 60}, write_through=True)
    run(rig, range(30), 1)
    run(rig, range(100, 130), 1)
    pair = [rig.add(range(first, first + 30), 1) for first in (100, 0)]
    rig.drain()
    for handle in pair:
        rig.judge(handle)
    assert rig.cached[pair[0]] == 28


def test_a_failed_request_leaves_no_checkpoint_of_an_earlier_step(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, budget=64)
    rig.add(range(18), 20, fail_after=9)
    rig.drain()
    assert rig.states.pool.num_cached == 0


def test_a_reset_empties_tiers_of_checkpoints(Rig: Any) -> None:
    disks = {"disk": MockDisk(), "state_disk": MockDisk()}
    rig = Rig(1, **TIERED, write_through=True, **disks)
    run(rig, range(30), 5)
    assert disks["state_disk"] and rig.store.states.host.num_cached
    rig.core.reset_prefix_cache()
    assert not disks["state_disk"] and not rig.store.states.host.num_cached
    assert rig.cached[run(rig, range(30), 5)] == 0


def test_conversations_need_a_checkpoint_each(Rig: Any, depth: int) -> None:
    """Two conversations in turn, and three checkpoints: one of each, and one for the next turn."""
    rig = Rig(depth, states=3, budget=64, blocks=80, slots=1, places=CheckpointPlaces(turn=False))
    texts, found = [list(range(first, first + 14)) for first in (0, 100)], list[int]()
    for turn in range(5):
        for text in texts:
            handle = run(rig, text, 4)
            found.append(rig.cached[handle])
            text += [*rig.tokens[handle], 7, 8 + turn]
    assert found == [0, 0, 12, 12, 16, 16, 24, 24, 28, 28]
    assert rig.states.taken == 10, "a checkpoint for each prompt, and none where an answer ended"


def test_a_second_prompt_that_goes_on_where_an_answer_ended_parts_there(Rig: Any, depth: int) -> None:
    rig = Rig(depth, states=8, budget=64, blocks=80, places=CheckpointPlaces(turn=False))
    first = run(rig, range(14), 7)
    text = [*range(14), *rig.tokens[first]]
    cached = [rig.cached[run(rig, [*text, *range(40 + i, 60 + i)], 1)] for i in range(4)]
    assert cached == [12, 12, 20, 20]


def test_a_checkpoint_that_two_prompts_have_gone_on_at_is_not_the_first_to_go(Rig: Any) -> None:
    rig = Rig(1, states=3, budget=64, blocks=80)
    run(rig, range(14), 1)
    for i in range(2):
        run(rig, [*range(14), *range(40 + i, 50 + i)], 1)
    run(rig, range(200, 214), 1)
    assert rig.cached[run(rig, range(14), 1)] == 12


def test_a_fast_conversation_leaves_the_checkpoint_of_a_slow_one(Rig: Any, depth: int) -> None:
    """Only the last checkpoint of a conversation is of use, so those before it go first."""
    rig = Rig(depth, states=3, budget=64, blocks=80, places=CheckpointPlaces(turn=False))
    slow, fast = list(range(100, 114)), list(range(14))
    run(rig, slow, 4)
    for turn in range(5):
        fast += [*rig.tokens[run(rig, fast, 4)], 7, 8 + turn]
    assert rig.cached[run(rig, [*slow, 5], 1)] == 12


def test_a_turn_goes_on_in_host_memory_where_blocks_and_a_checkpoint_meet(Rig: Any, depth: int) -> None:
    """Host memory has all blocks of the answer, and the last checkpoint stands before it."""
    rig = Rig(depth, **TIERED, write_through=True, places=CheckpointPlaces(turn=False))
    first = run(rig, range(30), 8)
    for other in (100, 200, 300):
        run(rig, range(other, other + 30), 8)
    assert rig.cached[run(rig, [*range(30), *rig.tokens[first], 7], 1)] == 28


def test_a_step_that_fails_after_its_request_was_aborted_leaves_no_checkpoint(Rig: Any) -> None:
    rig = Rig(2, states=8, budget=64)
    handle = rig.add(range(18), 20, fail_after=0)
    rig.step()
    rig.abort(handle)
    rig.drain()
    assert any(len(plan.features.states.kept) for plan in rig.plans if plan.features.states is not None)
    assert rig.states.pool.num_cached == 0


def test_a_prompt_that_another_engine_has_computed_goes_on_at_its_checkpoint(Rig: Any, depth: int) -> None:
    """The checkpoint is promised with the blocks, and kept with them until the other engine has it."""
    rig = Rig(depth, **TIERED, write_through=True)
    rig.add(range(30), 1, transfer=Transfer(name="a"))
    for _ in range(12):
        rig.step()
    assert len(rig.store.sharing.held()) == 7 and len(rig.store.sharing.states.held()) == 1
    peers, state_peers = MockPeers(), MockPeers()
    rig.mock._copies.teach(rig.store.host._index, peers)
    rig.mock._state_copies.teach(rig.store.states.host._index, state_peers)
    other = Rig(depth, **TIERED, peers=peers, state_peers=state_peers)
    found = run(other, range(30), 5, transfer=Transfer(name="a", address="a:1", num_tokens=30))
    assert other.cached[found] == 28 and not state_peers.promised
    rig.store.sharing.told.put(("a", False))
    rig.store.sharing.expire()
    rig.drain()
    assert not rig.store.sharing.states.held()

"""Layers that keep states: the mock notices a request that goes on with another state than that of its tokens."""

from array import array
from typing import Any

import pytest

from quire.kv.hashing import KeyChain
from quire.kv.states import StateCheckpoints


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
    assert (rig.states.hits, rig.states.cut) == (48, 12)


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

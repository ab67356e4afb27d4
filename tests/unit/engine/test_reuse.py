"""Tokens that are computed once and reused: exact numbers, as reported and as the executor saw them."""

from typing import Any

import pytest

from quire.contracts.request import RequestState
from quire.contracts.step import SAMPLE

PROMPT = list(range(22))  # 5 full blocks of 4, and 2 tokens


def computed(rig: Any, handle: int) -> int:
    """Tokens that the executor computed for a request."""
    return int(rig.mock.computed[str(handle)])


def test_second_request_reuses_every_full_block(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    first = rig.add(PROMPT, 1)
    rig.drain()
    second = rig.add(PROMPT, 1)
    rig.drain()
    assert (rig.cached[first], computed(rig, first)) == (0, 22)
    assert (rig.cached[second], computed(rig, second)) == (20, 2)
    assert (rig.outputs.stats.prefix.hits, rig.outputs.stats.prefix.queries) == (20, 44)
    rig.judge(second)


def test_the_last_token_is_computed_even_if_every_block_is_there(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    rig.add(PROMPT[:20], 1)
    rig.drain()
    again = rig.add(PROMPT[:20], 3)
    rig.drain()
    assert (rig.cached[again], computed(rig, again)) == (16, 4 + 2)
    rig.judge(again)


def test_the_shared_part_ends_where_the_prompts_part(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    rig.add(PROMPT, 1)
    rig.drain()
    other = rig.add([*PROMPT[:11], 99, *PROMPT[12:]], 1)
    rig.drain()
    assert (rig.cached[other], computed(rig, other)) == (8, 14)
    rig.judge(other)


def test_generated_tokens_are_reused_too(Rig: Any, depth: int) -> None:
    """A follow-up turn: prompt, answer, question. The answer's blocks came from decoding."""
    rig = Rig(depth)
    first = rig.add(PROMPT, 11)
    rig.drain()
    turn = PROMPT + rig.tokens[first] + [7, 7, 7]
    second = rig.add(turn, 2)
    rig.drain()
    assert (rig.cached[second], computed(rig, second)) == (32, len(turn) - 32 + 1)  # 32 of 33: the 33rd has no KV
    rig.judge(second)


def test_blocks_are_shared_in_the_very_step_that_computes_them(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=64)
    first, second = rig.add(PROMPT, 3), rig.add(PROMPT, 3)
    rig.step()
    assert len(rig.plans[0].admitted) == 2
    rig.drain()
    assert (rig.cached[first], rig.cached[second], computed(rig, second)) == (0, 20, 2 + 2)
    rig.judge(first), rig.judge(second)


def test_the_last_chunk_of_a_prompt_is_shared_in_the_step_that_computes_it(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=14, slots=4)
    first = rig.add(PROMPT, 3)
    rig.step()  # 14 of 22 tokens are planned: 3 full blocks
    second = rig.add(PROMPT, 3)
    rig.step()  # 8 more go first, then 6 of the second's
    assert rig.plan_of() == {rig.request(first).slot: 8, rig.request(second).slot: 2}
    rig.drain()
    assert rig.cached[second] == 20  # admission came after the rest was planned
    rig.judge(second)


def test_children_wait_for_the_prompt_and_compute_only_its_tail(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=16)
    parent = rig.add(PROMPT, 3)
    children = [rig.add(PROMPT, 3, parent=parent) for _ in range(3)]
    assert rig.scheduler.roster.num_blocked == 3 and len(rig.scheduler.queue) == 1
    rig.step()
    assert [rig.request(c).state for c in children] == [RequestState.BLOCKED] * 3  # 16 of 22 tokens planned
    rig.step()
    assert rig.scheduler.roster.num_blocked == 0
    assert rig.plan_of() == {rig.request(h).slot: n for h, n in zip([parent, *children], (6, 2, 2, 2), strict=True)}
    rig.drain()
    for child in children:
        assert (rig.cached[child], computed(rig, child)) == (20, 2 + 2)
        rig.judge(child)


@pytest.mark.parametrize("ends", ["abort", "failure", "deadline"])
def test_children_go_on_when_their_parent_ends_before_its_prompt(Rig: Any, depth: int, ends: str) -> None:
    rig = Rig(depth, budget=8)
    parent = rig.add(
        PROMPT, 3, deadline=1.0 if ends == "deadline" else None, fail_after=0 if ends == "failure" else None
    )
    children = [rig.add(PROMPT, 3, parent=parent) for _ in range(2)]
    rig.step()
    if ends == "abort":
        rig.abort(parent)
    rig.now = 2.0
    rig.drain()
    for handle in (parent, *children):
        rig.judge(handle)
    if ends != "failure":
        assert rig.cached[children[0]] == 8 and len(rig.tokens[parent]) == 0


def test_a_late_child_is_not_blocked_and_an_orphan_is_an_ordinary_request(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=64)
    parent = rig.add(PROMPT, 6)
    rig.step(2)
    late = rig.add(PROMPT, 6, parent=parent)
    assert rig.request(late).state is RequestState.WAITING
    rig.drain()
    orphan = rig.add(PROMPT, 6, parent=parent)
    rig.drain()
    assert rig.cached[late] == rig.cached[orphan] == 20
    rig.judge(late), rig.judge(orphan)


def test_a_child_of_a_child_waits_its_turn(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=8)
    first = rig.add(PROMPT, 2)
    second = rig.add(PROMPT, 2, parent=first)
    third = rig.add(PROMPT, 2, parent=second)
    rig.step()
    assert rig.request(third).state is RequestState.BLOCKED
    rig.drain()
    assert rig.cached[second] == rig.cached[third] == 20


@pytest.mark.parametrize("reads", [True, False])
def test_a_resumed_request_finds_its_own_blocks(Rig: Any, depth: int, reads: bool) -> None:
    """It gave way; what nobody needed since is still there, and only the rest is computed again."""
    rig = Rig(depth, blocks=9, budget=32)
    first, second = rig.add(range(50, 62), 16), rig.add(PROMPT[:12], 16, read_prefix_cache=reads)
    while rig.scheduler.num_preempted == 0:
        confirmed = 12 + len(rig.tokens[second])
        rig.step()
    before = computed(rig, second)
    rig.abort(first)
    while rig.request(second).state is not RequestState.RUNNING:
        rig.step()
    (resumed,) = rig.plans[-1].admitted
    known = len(resumed.token_ids)
    assert resumed.num_computed == (confirmed - 1) // 4 * 4  # nobody took a block in between
    assert known == confirmed + depth - 1  # with the token that was in flight
    assert computed(rig, second) == before + known - resumed.num_computed
    rig.drain()
    rig.judge(second)
    assert rig.cached[second] == 0  # of its prompt, at its first admission
    admitter = rig.scheduler.admitter
    assert (admitter.prefix_hits, admitter.prefix_queries) == (0, 24)  # its own blocks are no hits


def test_reused_tokens_are_reported_once_and_survive_an_early_preemption(Rig: Any) -> None:
    """Admitted in one plan and sent back in the next, before the first result is collected."""
    rig = Rig(2, blocks=9, budget=64)
    rig.add(PROMPT[:16], 1)
    rig.drain()
    first = rig.add(range(50, 66), 15)
    while len(rig.tokens[first]) < 3:
        rig.step()
    second = rig.add(PROMPT[:16], 4)
    rig.drain()
    assert rig.scheduler.num_preempted >= 1
    assert rig.cached[second] == 12
    rig.judge(second)


def test_cached_tokens_of_an_aborted_request_are_not_reported(Rig: Any) -> None:
    rig = Rig(2, budget=64)
    handle = rig.add(PROMPT, 4)
    rig.step()
    rig.abort(handle)
    rig.drain()
    assert handle not in rig.cached


# --- who may share ------------------------------------------------------------------------------------------------


def test_without_prefix_caching_an_identical_prompt_computes_everything(Rig: Any, depth: int) -> None:
    rig = Rig(depth, caching=False)
    rig.add(PROMPT, 2)
    rig.drain()
    second = rig.add(PROMPT, 2)
    child = rig.add(PROMPT, 2, parent=second)
    rig.drain()
    assert (rig.cached[second], computed(rig, second)) == (0, 22 + 1)
    assert (rig.cached[child], computed(rig, child)) == (20, 2 + 1)  # completions of one prompt still share
    rig.judge(second), rig.judge(child)


def test_without_prefix_caching_a_resumed_request_still_finds_its_blocks(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=9, budget=32, caching=False)
    first, second = rig.add(range(50, 62), 16), rig.add(PROMPT[:12], 16)
    while rig.scheduler.num_preempted == 0:
        rig.step()
    rig.abort(first)
    while rig.request(second).state is not RequestState.RUNNING:
        rig.step()
    assert rig.plans[-1].admitted[0].num_computed >= 12
    rig.drain()
    rig.judge(second)


def test_without_prefix_caching_the_next_request_gets_the_memory_of_the_last(Rig: Any, depth: int) -> None:
    """Blocks that nobody can find must not wait behind all others until they are written again."""
    rig = Rig(depth, caching=False)
    used = []
    for prompt in (PROMPT, PROMPT[::-1]):
        handle = rig.add(prompt, 9)
        while rig.request(handle).slot < 0:
            rig.step()
        used.append(set(rig.allocator.table(rig.request(handle).slot)))
        rig.drain()
        assert rig.allocator.pool.num_cached == 0 and not rig.allocator.pool.evictions
    assert used[1] <= set(range(1, 9)), "31 tokens of the first took 8 blocks"


def test_without_prefix_caching_a_prompt_is_kept_until_its_last_completion_ends(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1, caching=False)
    first = rig.add(PROMPT, 9)
    others = [rig.add(PROMPT, 9, parent=first) for _ in range(2)]
    rig.drain()
    assert [rig.cached[handle] for handle in others] == [20, 20], "one slot: each began when the one before had ended"
    assert rig.allocator.pool.num_cached == 0 and not rig.scheduler.roster._completions
    rig.add(PROMPT[:2], 3), rig.abort(rig.add(PROMPT[:2], 3))
    rig.drain()
    assert rig.allocator.pool.num_cached == 0 and not rig.scheduler.roster._completions


def test_salts_do_not_share(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    cached = []
    for salt in ("", "a", "b", "a", ""):
        handle = rig.add(PROMPT, 2, cache_salt=salt)
        rig.drain()
        cached.append(rig.cached[handle])
    assert cached == [0, 0, 0, 20, 20]


def test_a_request_may_decline_to_read_the_cache_and_still_feeds_it(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    for reads, expected in ((False, 0), (False, 0), (True, 20)):
        handle = rig.add(PROMPT, 2, read_prefix_cache=reads)
        rig.drain()
        assert (rig.cached[handle], computed(rig, handle)) == (expected, 22 - expected + 1)


def test_reset_forgets_what_nobody_holds_and_what_somebody_does(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=64)
    rig.add(PROMPT, 1)
    rig.drain()
    assert rig.core.reset_prefix_cache() is True
    running = rig.add(PROMPT, 30)
    rig.step(2)
    assert rig.core.reset_prefix_cache() is False
    again = rig.add(PROMPT, 2)
    rig.drain()
    assert rig.cached[running] == rig.cached[again] == 0
    rig.judge(running), rig.judge(again)


# --- prompt rows --------------------------------------------------------------------------------------------------


def test_prompt_rows_need_every_position_computed_once(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=6)
    rig.add(PROMPT, 2)
    rig.drain()
    scored = rig.add(PROMPT, 2, scored=True)
    rig.drain()
    assert (rig.cached[scored], computed(rig, scored)) == (0, 22 + 1)
    assert [p for p, _, _ in rig.rows[scored]] == list(range(21)) and [i for _, i, _ in rig.rows[scored]] == PROMPT[1:]
    rig.judge(scored)
    single = rig.add([5], 2, scored=True)
    rig.drain()
    assert rig.rows[single] == [] and rig.plans[-2].outputs.tolist() == [SAMPLE]  # nothing to score, so not asked


def test_prompt_rows_survive_a_preemption_in_the_middle_of_the_prompt(Rig: Any, depth: int) -> None:
    """Rows already delivered are not computed or delivered again."""
    rig = Rig(depth, blocks=12, budget=6, slots=2)
    first = rig.add(range(50, 62), 20)
    while first not in rig.cached or len(rig.tokens[first]) < 2:
        rig.step()
    scored = rig.add(range(100, 132), 2, scored=True)
    while rig.scheduler.num_preempted == 0:
        rig.step()
    delivered = len(rig.rows[scored])
    assert 0 < delivered < 31
    rig.drain()
    rig.judge(scored)
    resumed = [a for p in rig.plans for a in p.admitted if a.request_id == str(scored)][1]
    assert 0 < resumed.num_computed < delivered  # so some rows came twice from the executor


# --- why not more ---------------------------------------------------------------------------------------------------


def why(rig: Any, handle: int) -> tuple[str, int, int | None, str]:
    """The reason, the block and the differing token of a request's report."""
    report = rig.prefixes[handle]
    assert report.num_blocks == len(rig.prompts[handle]) // 4 and report.position == 4 * report.block
    assert rig.cached[handle] == report.num_reused * 4 and report.num_reused == report.block
    return report.why.value, report.block, report.differs_at, report.detail or report.nearest


def test_a_miss_says_where_the_chain_broke_and_why(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=64)
    first, same = rig.add(PROMPT, 1), rig.add(PROMPT, 1)  # the second shares in the step that computes the first
    salted, edited = rig.add(PROMPT, 1, cache_salt="a"), rig.add([*PROMPT[:9], 99, *PROMPT[10:]], 1)
    closed = rig.add(PROMPT, 1, read_prefix_cache=False)
    rig.drain()
    assert why(rig, first) == ("new", 0, None, "") and same not in rig.prefixes
    assert why(rig, salted) == ("extras", 0, None, "salt")
    assert why(rig, edited) == ("tokens", 2, 9, str(same)) and why(rig, closed) == ("off", 0, None, "")
    scored = rig.add(PROMPT, 1, scored=True)
    rig.drain()
    assert why(rig, scored) == ("limit", 0, None, "")


def test_a_miss_by_eviction_says_when(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=8, budget=64)
    rig.add(PROMPT, 1)
    rig.drain()
    rig.now = 5.0
    rig.add([7] * 20, 1)  # five blocks, and three never had a content
    rig.drain()
    rig.now = 7.0
    again = rig.add(PROMPT, 1)
    rig.drain()
    assert why(rig, again) == ("dropped", 3, None, "evicted") and rig.prefixes[again].seconds == 2.0


def test_an_engine_without_prefix_caching_says_so(Rig: Any, depth: int) -> None:
    rig = Rig(depth, caching=False)
    rig.add(PROMPT, 1)
    rig.drain()
    second = rig.add(PROMPT, 1)
    rig.drain()
    assert why(rig, second) == ("off", 0, None, "") and not rig.scheduler.admitter._history._prompts


@pytest.mark.parametrize(("pool", "cached", "count"), [("last", 20, 2), ("mean", 0, 22), ("cls", 0, 22)])
def test_a_vector_of_all_rows_computes_them_all_and_leaves_them_for_others(
    Rig: Any, depth: int, pool: str, cached: int, count: int
) -> None:
    rig = Rig(depth)
    rig.add(PROMPT, 1)
    rig.drain()
    vector = rig.add(PROMPT, 0, pool=pool, read_prefix_cache=pool == "last")
    rig.drain()
    assert (rig.cached[vector], computed(rig, vector)) == (cached, count)
    rig.judge(vector)
    after = rig.add(PROMPT, 1)
    rig.drain()
    assert rig.cached[after] == 20


def test_a_vector_whose_prompt_was_preempted_is_computed_from_its_beginning(Rig: Any, depth: int) -> None:
    """Its first blocks are still in the cache when it comes back."""
    rig = Rig(depth, blocks=9, budget=9, slots=2)
    rig.add([5] * 3, 20)
    rig.step(2)
    vector = rig.add(PROMPT, 0, pool="mean", read_prefix_cache=False)
    while rig.request(vector).slot < 0:
        rig.step()
    rig.scheduler.growth.preempt_last()
    assert rig.request(vector).num_preemptions == 1
    rig.drain()
    assert computed(rig, vector) > 22
    rig.judge(vector)

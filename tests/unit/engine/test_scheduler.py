"""The plan of a step: budget and order, admission, one step ahead of the results, giving way, limits and refusals."""

from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter, PromptTooLong, QueueFull
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.request import FinishReason, RequestState
from quire.contracts.step import SAMPLE, StepResult

from ...support.checked_executor import CheckedExecutor
from ...support.mock_tokens import mock_tokens


def slot(rig: Any, handle: int) -> int:
    """The slot that a running request holds."""
    return int(rig.request(handle).slot)


def sampled(rig: Any) -> int:
    """Tokens that the device sampled in all plans so far."""
    return sum(int(((p.outputs & SAMPLE) > 0).sum()) for p in rig.plans)


# --- budget and order ---------------------------------------------------------------------------------------------


def test_decodes_go_first_and_a_long_prompt_takes_exactly_what_is_left(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=8, slots=4)
    short = [rig.add([1, 2, 3], 30), rig.add([4, 5, 6], 30)]
    rig.step()
    assert list(rig.plan_of().values()) == [3, 3]
    long = rig.add(range(20), 4)
    for chunk in (6, 6, 6, 2):
        rig.step()
        a, b = (slot(rig, h) for h in short)
        assert list(rig.plan_of().items()) == [(a, 1), (b, 1), (slot(rig, long), chunk)]
    assert rig.plans[-1].num_rows.tolist() == [1, 1, 1] and rig.plans[-2].num_rows.tolist() == [1, 1, 0]
    rig.drain()


def test_few_prompts_beside_answers_come_in_small_chunks_and_many_at_once(
    Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is 4 tokens, or one for each answer; what does not fit into 8 of them comes first."""
    rig = Rig(depth, budget=64, slots=8, blocks=90)
    rig.scheduler._chunk = 4
    monkeypatch.setattr("quire.engine.scheduler.SHORT_STEPS", 8)
    rig.add(range(30), 60)
    rig.step()
    assert list(rig.plan_of().values()) == [30], "nobody is being answered"
    few = [rig.add(range(40, 50), 60), rig.add(range(60, 67), 60)]
    for chunks in ([4], [4], [2, 2], [4], [1]):
        rig.step()
        assert list(rig.plan_of().values()) == [1] * (len(rig.plan_of()) - len(chunks)) + chunks
    assert len(rig.plan_of()) == 3 and slot(rig, few[1]) in rig.plan_of()
    rig.add(range(500, 533), 60)
    rig.step()
    assert list(rig.plan_of().values()) == [1, 1, 1, 33], "33 tokens are more than 8 chunks"
    for first in (600, 700):
        rig.add(range(first, first + 8), 60)
    rig.step()
    assert list(rig.plan_of().values()) == [1] * 4 + [4]
    rig.drain()


def test_the_end_of_a_long_prompt_comes_at_once(Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """33 tokens are more than 8 chunks of 4, so what is left of them is not cut either; that of 32 is."""
    monkeypatch.setattr("quire.engine.scheduler.SHORT_STEPS", 8)
    for size, ends in ((33, [7]), (32, [4, 2])):
        rig = Rig(depth, budget=30, slots=8, blocks=90)
        for first in range(4):
            rig.add([first], 60)
        rig.step()
        long = rig.add(range(500, 500 + size), 60)
        rig.step()
        assert rig.plan_of()[slot(rig, long)] == 26, "what four answers leave of the budget"
        rig.scheduler._chunk = 4
        for end in ends:
            rig.step()
            assert rig.plan_of()[slot(rig, long)] == end
        rig.drain()


def test_two_prompts_share_the_budget_in_order(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=10)
    first, second = rig.add(range(16), 2), rig.add(range(50, 66), 2)
    rig.step()
    assert list(rig.plan_of().values()) == [10]
    rig.step()
    assert rig.plan_of() == {slot(rig, first): 6, slot(rig, second): 4}
    rig.step()
    assert rig.plan_of()[slot(rig, second)] == 9  # beside the first one's second token
    rig.drain()


def test_first_come_first_served_ignores_priorities(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1, budget=8)
    handles = [rig.add([1, 2], 2, priority=p) for p in (3, 1, 2)]
    rig.drain()
    assert list(rig.finish) == handles


def test_priority_order_and_arrival_among_equals(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1, budget=8, policy="priority")
    running = rig.add([9], 6, priority=9)
    rig.step()
    handles = [rig.add([1, 2], 2, priority=p) for p in (3, 1, 2, 1)]
    rig.drain()
    assert list(rig.finish) == [running, handles[1], handles[3], handles[2], handles[0]]


def test_the_head_of_the_line_is_never_skipped(Rig: Any, depth: int) -> None:
    """A small request would fit beside the running one; the large one that came before it does not."""
    rig = Rig(depth, blocks=10, slots=4, budget=64)
    running = rig.add(range(20), 12)
    rig.step()
    large, small = rig.add(range(100, 124), 2), rig.add([7], 2)
    while running not in rig.finish:
        rig.step()
        if running not in rig.finish:
            assert rig.request(large).state is rig.request(small).state is RequestState.WAITING
    rig.drain()
    assert rig.cached[large] == rig.cached[small] == 0


def test_watermark_holds_back_admission_only_beside_running_requests(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=10, budget=64, watermark=0.3)
    first = rig.add(range(36), 4)  # 9 of 10 blocks: with nobody else running the watermark does not count
    rig.step()
    assert rig.request(first).state is RequestState.RUNNING
    rig.drain()
    rig = Rig(depth, blocks=10, budget=64, watermark=0.3)
    rig.add(range(12), 4)
    rig.step()
    five_blocks = rig.add(range(100, 117), 2)  # 3 or 4 + 5 leaves less than the watermark of 3
    rig.step()
    assert rig.request(five_blocks).state is RequestState.WAITING
    rig.abort(five_blocks)
    three_blocks = rig.add(range(100, 112), 2)
    rig.step()
    assert rig.request(three_blocks).state is RequestState.RUNNING
    rig.drain()


@pytest.mark.parametrize("prompts", [[40, 40, 40], [1] * 6, [39, 1, 39, 1], [40, 3, 3, 3]])
def test_admission_never_deadlocks_in_the_smallest_pool(Rig: Any, depth: int, prompts: list[int]) -> None:
    """Every request may need the whole pool at its end."""
    rig = Rig(depth, blocks=12, slots=3, budget=3, watermark=0.5)
    for i, length in enumerate(prompts):
        rig.add(range(i * 100, i * 100 + length), 48 - length)
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


# --- one step ahead -----------------------------------------------------------------------------------------------


def test_next_plan_is_submitted_before_the_last_result_is_collected(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    rig.add([1, 2, 3], 4)
    rig.drain()
    order = [
        ("submit", 0),
        ("submit", 1),
        ("collect", 0),
        ("submit", 2),
        ("collect", 1),
        ("submit", 3),
        ("collect", 2),
        ("collect", 3),
    ]
    assert rig.events == (order if depth == 2 else sorted(order, key=lambda e: (e[1], e[0] == "collect")))


class OneTokenAtATime(CheckedExecutor):
    """Two steps in flight, but a slot decodes only from a token that has been collected."""

    def facts(self) -> ExecutorFacts:
        f = super().facts()
        return ExecutorFacts(
            depth=f.depth,
            decode_lag=1,
            num_slots=f.num_slots,
            num_blocks=f.num_blocks,
            block_size=f.block_size,
            max_model_len=f.max_model_len,
            vocab_size=f.vocab_size,
        )


def test_decode_lag_bounds_the_steps_in_flight_of_a_slot(Rig: Any) -> None:
    """With a lag of 1 at depth 2 each token waits for the one before, and prompt chunks are still pipelined."""
    rig = Rig(2, mock=OneTokenAtATime, budget=8)
    rig.add(range(20), 4)
    rig.step(2)
    assert [kind for kind, _ in rig.events] == ["submit", "submit", "collect"]
    rig.drain()
    rig.judge(0)
    decodes = [p.step for p in rig.plans if (p.outputs & SAMPLE).any()]
    for step in decodes[1:]:
        at = rig.events.index(("submit", step))
        assert rig.events.index(("collect", decodes[decodes.index(step) - 1])) < at


def test_length_is_decided_at_planning(Rig: Any, depth: int) -> None:
    """Not one step or token more than the limited request needs, though its last token is not known yet."""
    rig = Rig(depth, budget=64)
    rig.add([1, 2, 3], 5)
    rig.drain()
    assert len(rig.plans) == 5 and sampled(rig) == 5 and rig.mock.computed["0"] == 3 + 4


def test_a_stop_id_drops_the_token_computed_ahead(Rig: Any, depth: int) -> None:
    prompt = [1, 2, 3]
    answer = mock_tokens(prompt, 0, 20, 1000)
    rig = Rig(depth)
    handle = rig.add(prompt, 20, stop_ids=(answer[3],))
    rig.drain()
    assert rig.tokens[handle] == answer[:4]
    assert (rig.finish[handle].reason, rig.finish[handle].stop_id) == (FinishReason.STOP, answer[3])
    assert sampled(rig) == (4 if depth == 1 else 5)


def test_min_tokens_come_before_any_stop(Rig: Any, depth: int) -> None:
    prompt = [1, 2, 3]
    answer = mock_tokens(prompt, 0, 20, 3)
    rig = Rig(depth, vocab=3)
    handle = rig.add(prompt, 20, stop_ids=(0, 1, 2), min_tokens=6)
    rig.drain()
    assert rig.tokens[handle] == answer[:7] and rig.finish[handle].stop_id == answer[6]


def test_a_slot_is_reused_at_once_and_late_results_find_their_owner(Rig: Any) -> None:
    """At depth 2 the next request takes the slot of one whose extra token is still in flight."""
    rig = Rig(2, slots=1, budget=8)
    prompt = [1, 2, 3]
    first = rig.add(prompt, 20, stop_ids=(mock_tokens(prompt, 0, 1, 1000)[0],))
    second = rig.add([4, 5, 6], 3)
    rig.step(3)
    assert first in rig.finish and slot(rig, second) == 0
    rig.drain()
    assert len(rig.tokens[first]) == 1
    rig.judge(second)


# --- giving way ---------------------------------------------------------------------------------------------------


def test_the_last_in_order_gives_way_keeps_its_token_in_flight_and_resumes(Rig: Any, depth: int) -> None:
    """Two requests of 7 blocks each at their end in a pool of 9: the second is sent back, the first never."""
    rig = Rig(depth, blocks=9, budget=32)
    first, second = rig.add(range(12), 16), rig.add(range(50, 62), 16)
    while rig.scheduler.num_preempted == 0:
        before = len(rig.tokens[second])
        in_flight = int(rig.table.in_flight[slot(rig, second)]) if rig.plans else 0
        rig.step()
    request = rig.request(second)
    assert request.state is RequestState.WAITING and rig.request(first).num_preemptions == 0
    assert in_flight == depth - 1 and len(rig.tokens[second]) == before + in_flight  # at depth 1 nothing is in flight
    assert list(request.tokens) == [*range(50, 62), *rig.tokens[second]]
    rig.drain()
    rig.judge(first), rig.judge(second)
    (again,) = [a for p in rig.plans for a in p.admitted if a.request_id == str(second)][1:]
    assert again.token_ids.tolist() == list(range(50, 62)) + rig.tokens[second][: len(again.token_ids) - 12]


def test_a_step_that_takes_blocks_away_admits_nobody(Rig: Any, depth: int) -> None:
    """Not even an urgent request that waits for nothing but the slot."""
    rig = Rig(depth, blocks=9, slots=2, budget=32, policy="priority")
    rig.add(range(12), 16), rig.add(range(50, 62), 16)
    rig.step()
    urgent = rig.add([1], 3, priority=-1)
    while rig.scheduler.num_preempted == 0:
        rig.step()
    assert rig.request(urgent).state is RequestState.WAITING
    rig.step()
    assert rig.request(urgent).state is RequestState.RUNNING
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


def test_a_preempted_request_is_readmitted_only_after_its_token(Rig: Any) -> None:
    """With three steps in flight there is a plan in between: it must leave the request out."""
    rig = Rig(3, blocks=9, budget=32)
    first, second = rig.add(range(12), 16), rig.add(range(50, 62), 16)
    while rig.scheduler.num_preempted == 0:
        rig.step()
    request = rig.request(second)
    assert request.in_flight == 1
    rig.abort(first)  # now there is room for it at once
    rig.step()
    assert request.state is RequestState.WAITING and request.in_flight == 0  # planned before, collected after
    rig.step()
    assert request.state is RequestState.RUNNING
    rig.drain()
    rig.judge(second)


def test_a_preempted_request_can_end_by_its_token_in_flight(Rig: Any) -> None:
    prompt = list(range(50, 62))
    answer = mock_tokens(prompt, 1, 16, 1000)
    probe = Rig(2, blocks=9, budget=32)
    probe.add(range(12), 16), probe.add(prompt, 16)
    while probe.scheduler.num_preempted == 0:
        probe.step()
    last = answer[len(probe.tokens[1]) - 1]
    rig = Rig(2, blocks=9, budget=32)
    rig.add(range(12), 16), rig.add(prompt, 16, stop_ids=(last,))
    rig.drain()
    assert rig.scheduler.num_preempted == 1 and rig.finish[1].stop_id == last
    assert len([a for p in rig.plans for a in p.admitted if a.request_id == "1"]) == 1
    rig.judge(1)


def test_a_preempted_request_can_end_by_its_length(Rig: Any) -> None:
    """Its last token is in flight and it needs no more, but another's need takes its blocks."""

    def two(max_tokens: int) -> Any:
        rig = Rig(2, blocks=8, slots=2, budget=32)
        rig.add(range(13), 16), rig.add(range(50, 62), max_tokens)
        while rig.scheduler.num_preempted == 0:
            rig.step()
        return rig

    rig = two(max_tokens=len(two(max_tokens=16).tokens[1]))
    assert rig.finish[1].reason is FinishReason.LENGTH
    rig.drain()
    assert len([a for p in rig.plans for a in p.admitted if a.request_id == "1"]) == 1
    rig.judge(0), rig.judge(1)


def test_lower_priority_gives_way_though_it_came_first(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=9, budget=32, policy="priority")
    late, urgent = rig.add(range(12), 16, priority=1), rig.add(range(50, 62), 16, priority=0)
    rig.step()
    victims = {late: rig.request(late), urgent: rig.request(urgent)}
    rig.drain()
    assert victims[late].num_preemptions >= 1 and victims[urgent].num_preemptions == 0
    assert list(rig.finish) == [urgent, late]


# --- refusals -----------------------------------------------------------------------------------------------------


def test_what_can_never_run_is_refused_and_nothing_is_kept(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=6, max_len=32)
    with pytest.raises(PromptTooLong, match=r"prompt \(30\) \+ max_tokens \(3\) = 33 tokens exceed the context of 32"):
        rig.add(range(30), 3)
    with pytest.raises(PromptTooLong, match="more than the 6 KV blocks of 4 tokens"):
        rig.add(range(20), 5)
    with pytest.raises(InvalidParameter, match="the prompt is empty"):
        rig.add([], 5)
    assert not rig.core.has_work
    rig.add(range(20), 4)  # exactly the pool
    rig.drain().judge(0)
    rig = Rig(depth, max_len=32)
    rig.add(range(30), 2)  # exactly the context
    rig.drain().judge(0)


def test_a_bounded_queue_refuses_new_requests_but_no_child_and_no_preempted_one(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1, max_waiting=2)
    rig.add([1], 2)
    parent = rig.add([2], 2)
    rig.add([9], 2)  # two wait, the first will fill the free slot
    with pytest.raises(QueueFull, match=r"3 requests are waiting already \(max_waiting=2\)"):
        rig.add([3], 2)
    children = [rig.add([2], 2, parent=parent) for _ in range(3)]
    rig.drain()
    rig.add([3], 2)
    rig.drain()
    for handle in [0, parent, *children]:
        rig.judge(handle)


def test_a_bounded_queue_takes_a_prompt_with_all_its_completions_or_not_at_all(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1, max_waiting=4)
    parent = rig.add([1], 2, places=5)  # more than the bound, but nobody waits
    for _ in range(4):
        rig.add([1], 2, parent=parent)
    with pytest.raises(QueueFull, match=r"5 requests are waiting already \(max_waiting=4\)"):
        rig.add([2], 2)  # those that are blocked on their prompt wait, too
    rig.step()
    rig.abort(parent)
    rig.drain()
    rig.add([1], 2), rig.add([2], 2), rig.add([3], 2), rig.add([6], 2)
    with pytest.raises(QueueFull, match=r"2 more do not fit"):
        rig.add([4], 2, places=2)
    assert len(rig.scheduler.queue) == 4
    rig.add([4], 2, places=0)
    past = [rig.add([5], 2, places=0) for _ in range(3)]  # past the bound
    rig.drain()
    for handle in past:
        rig.judge(handle)


def test_requests_that_can_start_at_once_do_not_wait(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=4, max_waiting=1)
    burst = [rig.add([i], 4) for i in range(5)]
    with pytest.raises(QueueFull):
        rig.add([5], 4)
    rig.step()
    with pytest.raises(QueueFull):  # one waits for the four
        rig.add([5], 4)
    rig.drain()
    for handle in burst:
        rig.judge(handle)


def test_many_completions_do_not_slip_past_the_bound(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=2, max_waiting=3)
    rig.add([1], 8), rig.add([2], 8)
    rig.step()
    assert len(rig.scheduler.queue) == 0
    with pytest.raises(QueueFull, match="4 more do not fit"):  # nobody waits, but every slot is taken
        rig.add([3], 2, places=4)
    rig.drain()
    parent = rig.add([3], 2, places=5)
    children = [rig.add([3], 2, parent=parent) for _ in range(4)]
    rig.drain()
    for handle in (parent, *children):
        rig.judge(handle)


def test_what_never_fits_is_no_matter_of_time(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=2, max_waiting=3)
    with pytest.raises(InvalidParameter, match=r"6 completions .* at most 5 do \(max_num_seqs=2 and max_waiting=3\)"):
        rig.add([3], 2, places=6)
    rig.add([3], 2, places=0)
    rig.drain()


def test_without_a_bound_every_request_is_taken(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1, max_waiting=None)
    for i in range(200):
        rig.add([i], 1, places=300)
    rig.drain()


def test_a_preempted_request_returns_to_a_full_queue(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=2, blocks=9, budget=32, max_waiting=2)
    rig.add(range(12), 16), rig.add(range(50, 62), 16)
    rig.step()
    rig.add(range(70, 100), 2), rig.add(range(70, 100), 2)
    while rig.scheduler.num_preempted == 0:
        rig.step()
    assert len(rig.scheduler.queue) == 3
    with pytest.raises(QueueFull):
        rig.add([3], 2)
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


class NewestFirst(CheckedExecutor):
    """Hands over the wrong step."""

    def collect(self) -> StepResult:
        self._results.rotate()
        return super().collect()


class MixesSlots(CheckedExecutor):
    """Hands over the right step with its rows in another order."""

    def collect(self) -> StepResult:
        r = super().collect()
        return StepResult(step=r.step, slots=r.slots[::-1], tokens=r.tokens, num_accepted=r.num_accepted)


@pytest.mark.parametrize("mock", [NewestFirst, MixesSlots])
def test_results_out_of_order_break_an_invariant(Rig: Any, mock: type[CheckedExecutor]) -> None:
    rig = Rig(2, mock=mock)
    rig.add([1, 2], 5), rig.add([3, 4], 5)
    rig.step()
    with pytest.raises(AssertionError, match="results out of order"):
        rig.step()


def test_stats_count_what_the_step_saw(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=2, budget=8)
    for i in range(3):
        rig.add([i, i, i], 3)
    while not rig.outputs.handles.size:
        rig.step()
    stats = rig.outputs.stats
    assert (stats.step, stats.num_tokens, stats.num_running, stats.num_waiting) == (0, 6, 2, 1)
    assert stats.num_free_blocks == rig.pool.num_free and stats.prefix.queries == 6

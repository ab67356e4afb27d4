"""The end of a request: abort in every state, deadlines, failures that stay alone, nothing to generate."""

from typing import Any

import pytest

from quire.contracts.request import TRANSITIONS, BlockReason, FinishReason, NewRequest, Request, RequestState
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32, StepPlan, StepResult

from ...support.checked_executor import CheckedExecutor
from ...support.mock_tokens import mock_tokens

PROMPT = list(range(22))


# --- abort --------------------------------------------------------------------------------------------------------


def test_abort_while_waiting(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1)
    handles = [rig.add([i], 3) for i in range(3)]
    rig.step()
    rig.abort(handles[1])
    assert len(rig.scheduler.queue) == 1 and rig.core.step().finished[0].reason is FinishReason.ABORT
    assert handles[1] not in rig.requests


def test_abort_while_blocked(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=8)
    parent = rig.add(PROMPT, 3)
    child = rig.add(PROMPT, 3, parent=parent)
    rig.step()
    assert rig.request(child).state is RequestState.BLOCKED
    rig.abort(child)
    assert rig.scheduler.roster.num_blocked == 0
    rig.drain().judge(parent)
    assert rig.finish[child].reason is FinishReason.ABORT and child not in rig.cached


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_abort_while_running_frees_at_once_and_drops_what_is_in_flight(Rig: Any, depth: int, after: int) -> None:
    """In the middle of the prompt, at its end and while decoding."""
    rig = Rig(depth, budget=12)
    handle = rig.add(PROMPT, 30)
    rig.step(after)
    num = len(rig.tokens[handle])
    rig.abort(handle)
    assert rig.pool.num_free == rig.num_blocks and rig.table.num_free == rig.num_slots
    rig.drain()
    assert len(rig.tokens[handle]) == num and rig.finish[handle].reason is FinishReason.ABORT


def test_abort_after_a_preemption(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=9, budget=32)
    first, second = rig.add(range(12), 16), rig.add(range(50, 62), 16)
    while rig.scheduler.num_preempted == 0:
        rig.step()
    rig.abort(second)
    rig.drain().judge(first)
    assert rig.finish[second].reason is FinishReason.ABORT


def test_abort_of_a_finished_or_unknown_request_is_ignored(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    handle = rig.add([1], 2)
    rig.drain()
    rig.abort(handle), rig.abort(77)
    assert not rig.core.has_work and rig.finish[handle].reason is FinishReason.LENGTH


def test_blocks_of_an_aborted_request_can_be_reused(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=64)
    rig.abort(rig.add(PROMPT, 4))  # before anything was planned
    handle = rig.add(PROMPT, 4)
    rig.step()
    rig.abort(handle)
    again = rig.add(PROMPT, 4)
    rig.drain()
    assert rig.cached[again] == 20
    rig.judge(again)


def test_shutdown_with_steps_in_flight_stops_the_executor_and_waits_for_nothing(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    rig.add(PROMPT, 30)
    rig.step(3)
    events = list(rig.events)
    rig.core.shutdown()
    assert rig.mock.closed and rig.events == events
    rig.core.shutdown()


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_deadline_while_waiting_and_while_running(Rig: Any, depth: int) -> None:
    rig = Rig(depth, slots=1)
    running, waiting = rig.add([1], 60, deadline=5.0), rig.add([2], 60, deadline=4.0)
    rig.step(3)
    rig.now = 4.0
    rig.step()
    assert list(rig.finish) == [waiting] and rig.tokens[waiting] == []
    rig.now = 4.9
    rig.step()
    assert running not in rig.finish
    rig.now = 5.0
    rig.drain()
    for handle in (running, waiting):
        assert (rig.finish[handle].reason, rig.finish[handle].error) == (FinishReason.ERROR, "deadline")
        rig.judge(handle)


def test_a_deadline_met_in_time_does_nothing(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    handle = rig.add([1], 3, deadline=5.0)
    rig.drain()
    rig.now = 6.0
    rig.add([1], 3, handle=handle, deadline=20.0)  # the handle's next owner has its own
    rig.step()
    assert handle not in rig.finish
    rig.drain().judge(handle)


def test_what_a_late_request_computed_can_be_reused(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=64, slots=1)
    rig.add(PROMPT, 50, deadline=1.0), rig.add(PROMPT, 50, deadline=1.0)
    rig.step(2)
    rig.now = 1.0
    again = rig.add(PROMPT, 1)
    rig.drain()
    assert rig.cached[again] == 20


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [0, 1, 5])
def test_a_failed_request_fails_alone_with_the_tokens_before(Rig: Any, depth: int, outputs: int) -> None:
    rig = Rig(depth, budget=64)
    good, bad, other = rig.add([1, 2], 9), rig.add([3, 4], 9, fail_after=outputs), rig.add([5, 6], 9)
    rig.drain()
    assert len(rig.tokens[bad]) == outputs and rig.finish[bad].error == "nan_logits"
    for handle in (good, bad, other):
        rig.judge(handle)


def test_blocks_of_a_failed_request_are_not_reused(Rig: Any, depth: int) -> None:
    """Blocks that it took from others are reused: they were good before."""
    rig = Rig(depth)
    rig.add(PROMPT[:9], 1)
    rig.drain()
    rig.add(PROMPT, 9, fail_after=4)
    rig.drain()
    again = rig.add(PROMPT, 9)
    rig.drain()
    assert rig.cached[again] == 8
    rig.judge(again)


def test_blocks_of_a_request_that_failed_after_giving_way_are_not_reused(Rig: Any) -> None:
    """Its failure was in flight when it was preempted: what it had published is withdrawn all the same."""
    probe = Rig(2, blocks=9, budget=32)
    probe.add(range(12), 16), probe.add(range(50, 62), 16)
    while probe.scheduler.num_preempted == 0:
        probe.step()
    rig = Rig(2, blocks=9, budget=32)
    rig.add(range(12), 16), rig.add(range(50, 62), 16, fail_after=len(probe.tokens[1]) - 1)
    while 1 not in rig.finish:
        rig.step()
    assert rig.scheduler.num_preempted == 1 and rig.finish[1].error == "nan_logits"
    rig.abort(0)
    again = rig.add(range(50, 62), 2)
    rig.drain()
    assert rig.cached[again] == 0
    rig.judge(again), rig.judge(1)


class WildTokens(CheckedExecutor):
    """Returns a token outside the vocabulary for the requests in `wild`, at their second output."""

    wild = {"1": 1000, "2": -5}

    def _run(self, plan: StepPlan, masks: dict[int, I32]) -> StepResult:
        result = super()._run(plan, masks)
        for row, slot in enumerate(result.slots.tolist()):
            state = self._slots[slot]
            if state.request_id in self.wild and len(state.tokens) - state.num_prompt == 2:
                result.tokens[row, 0] = self.wild[state.request_id]
        return result


def test_a_token_outside_the_vocabulary_fails_only_its_request(Rig: Any, depth: int) -> None:
    rig = Rig(depth, mock=WildTokens)
    handles = [rig.add([i, i], 5, stop_ids=(3, 999)) for i in range(4)]
    rig.drain()
    for handle in handles[1:3]:
        assert (rig.finish[handle].reason, rig.finish[handle].error) == (FinishReason.ERROR, "bad_token")
        assert rig.tokens[handle] == mock_tokens([handle, handle], handle, 1, 1000)
    rig.judge(handles[0]), rig.judge(handles[3])


def test_a_failure_of_a_request_that_is_gone_is_ignored(Rig: Any) -> None:
    rig = Rig(2)
    handle = rig.add([1], 9, fail_after=0)
    rig.step()
    rig.abort(handle)
    rig.drain()
    assert rig.finish[handle].reason is FinishReason.ABORT


# --- nothing to generate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scored", [False, True])
def test_max_tokens_zero_computes_the_prompt_and_ends(Rig: Any, depth: int, scored: bool) -> None:
    rig = Rig(depth, budget=10)
    handle = rig.add(PROMPT, 0, scored=scored)
    rig.drain()
    assert rig.tokens[handle] == [] and rig.finish[handle].reason is FinishReason.LENGTH
    assert rig.mock.computed[str(handle)] == 22 and len(rig.plans) == 3
    assert [p.num_rows.tolist() for p in rig.plans] == ([[10], [10], [2]] if scored else [[0], [0], [0]])
    rig.judge(handle)


def test_max_tokens_zero_that_gives_way_in_flight_still_ends(Rig: Any) -> None:
    """Its only result is in flight when it is preempted."""
    rig = Rig(2, blocks=5, budget=16)
    first = rig.add(range(8), 8)
    while len(rig.tokens[first]) < 3:  # the next token but one needs a block
        rig.step()
    handle = rig.add(range(50, 58), 0)
    rig.drain()
    assert rig.scheduler.num_preempted == 1
    assert len([a for p in rig.plans for a in p.admitted if a.request_id == str(handle)]) == 1
    rig.judge(first), rig.judge(handle)


# --- states -------------------------------------------------------------------------------------------------------

ALLOWED = {
    ("waiting", "running"),
    ("waiting", "blocked"),
    ("waiting", "finished"),
    ("blocked", "waiting"),
    ("blocked", "finished"),
    ("running", "waiting"),
    ("running", "finished"),
}


@pytest.mark.parametrize("after", list(RequestState))
@pytest.mark.parametrize("before", list(RequestState))
def test_every_move_is_in_the_table_or_asserts(before: RequestState, after: RequestState) -> None:
    request = Request(
        NewRequest(
            handle=1, request_id="r1", token_ids=b"\1\0\0\0", max_tokens=1, sampler=SamplerSpec(seed=0, num_prompt=1)
        ),
        arrival=0,
    )
    request.state = before
    if (before.value, after.value) in ALLOWED:
        request.to(after, BlockReason.PARENT)
        assert request.state is after and request.blocked_on is BlockReason.PARENT
    else:
        with pytest.raises(AssertionError, match="r1: "):
            request.to(after)
        assert request.state is before
    assert TRANSITIONS.keys() == set(RequestState)


def test_a_handle_is_unique_among_live_requests(Rig: Any) -> None:
    rig = Rig(1)
    rig.add([1], 2, handle=5)
    with pytest.raises(AssertionError, match="handle 5 is live"):
        rig.add([1], 2, handle=5)
    rig.drain()
    rig.add([1], 2, handle=5)
    rig.drain().judge(5)

"""The mock must turn red: every kind of broken bookkeeping that the other tests rely on it to notice."""

from typing import Any

import numpy as np
import pytest

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import NO_MASKS, SAMPLE, Admission, StepPlan
from quire.kv.pool import BlockPool

from ...support.checked_executor import CheckedExecutor
from ...support.mock_tokens import mock_tokens


def admission(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> Admission:
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=np.array(tokens, np.int32),
        num_computed=computed,
        block_ids=(np.array(blocks, np.int32),),
        sampler=SamplerSpec(seed=slot, num_prompt=len(tokens)),
    )


def plan(
    step: int,
    slots: dict[int, int],
    *,
    decodes: int | None = None,
    admitted: tuple[Admission, ...] = (),
    samples: bool = True,
    appended: list[tuple[int, int, int]] | None = None,
    released: list[int] | None = None,
) -> StepPlan:
    """All rows decode, but those of slots that are admitted now."""
    if decodes is None:
        decodes = len(slots.keys() - {a.slot for a in admitted})
    return StepPlan(
        step=step,
        slots=np.array(list(slots), np.int32),
        num_decodes=decodes,
        num_tokens=np.array(list(slots.values()), np.int32),
        num_rows=np.full(len(slots), int(samples), np.int32),
        outputs=np.full(len(slots), SAMPLE if samples else 0, np.uint8),
        admitted=admitted,
        appended=np.array(appended or [], np.int32).reshape(-1, 3),
        released=np.array(released or [], np.int32),
    )


def started(depth: int = 1) -> CheckedExecutor:
    """Return a mock with a request of 6 tokens in blocks 1 and 2, its prompt computed."""
    mock = CheckedExecutor(depth=depth)
    run(mock, plan(0, {0: 6}, admitted=(admission(0, [5, 6, 7, 8, 9, 10], [1, 2]),)))
    return mock


def run(mock: CheckedExecutor, step: StepPlan) -> list[int]:
    mock.submit(step)
    mock.release(step.step, NO_MASKS)
    return [int(t) for t in mock.collect().tokens[:, 0]]


OTHERS = "attends to KV that is not its own prefix"


def test_right_plans_give_the_tokens_known_beforehand() -> None:
    mock = CheckedExecutor()
    tokens = run(mock, plan(0, {0: 6}, admitted=(admission(0, [5, 6, 7, 8, 9, 10], [1, 2]),)))
    tokens += run(mock, plan(1, {0: 1})) + run(mock, plan(2, {0: 1})) + run(mock, plan(3, {0: 1}, appended=[(0, 0, 3)]))
    assert tokens == mock_tokens([5, 6, 7, 8, 9, 10], 0, 4, 1000)
    assert mock.computed == {"r0": 9}


def test_an_answer_depends_on_the_whole_prefix_and_the_seed() -> None:
    asked = [([1, 2, 3], 0), ([1, 2, 3], 1), ([4, 2, 3], 0), ([2, 1, 3], 0)]
    answers = [mock_tokens(prompt, seed, 8, 1000) for prompt, seed in asked]
    assert len({tuple(a) for a in answers}) == 4
    assert mock_tokens([1, 2, 3, *answers[0][:5]], 0, 3, 1000) == answers[0][5:]


def test_it_notices_a_block_overwritten_by_another_request() -> None:
    mock = started()
    with pytest.raises(AssertionError, match=f"r0 {OTHERS}"):
        run(mock, plan(1, {0: 1, 1: 3}, admitted=(admission(1, [1, 2, 3], [2]),)))


def test_it_notices_an_overwritten_block_whenever_it_is_read() -> None:
    mock = started()
    run(mock, plan(1, {1: 3}, admitted=(admission(1, [1, 2, 3], [1]),)))
    with pytest.raises(AssertionError, match=f"r0 {OTHERS}"):
        run(mock, plan(2, {0: 1}))


def test_it_notices_a_wrong_block_table() -> None:
    mock = started()
    with pytest.raises(AssertionError, match=f"r1 {OTHERS}"):
        run(mock, plan(1, {1: 2}, admitted=(admission(1, [5, 6, 7, 8, 9, 10], [2, 3], computed=4),)))


def test_it_notices_a_stale_cached_block() -> None:
    """Block 1 holds another prefix than the one it is taken for: a wrong hash or a missing extra."""
    mock = started()
    with pytest.raises(AssertionError, match=f"r1 {OTHERS}"):
        run(mock, plan(1, {1: 2}, admitted=(admission(1, [5, 6, 7, 99, 9, 10], [1, 3], computed=4),)))


def test_it_notices_a_block_taken_for_computed_that_nobody_wrote() -> None:
    mock = started()
    with pytest.raises(AssertionError, match=f"r1 {OTHERS}"):
        run(mock, plan(1, {1: 2}, admitted=(admission(1, [1, 2, 3, 4, 5, 6], [7, 8], computed=4),)))


def test_a_block_written_in_the_same_step_counts_as_computed() -> None:
    mock = CheckedExecutor()
    tokens = run(
        mock,
        plan(
            0,
            {1: 2, 0: 6},
            admitted=(admission(0, [5, 6, 7, 8, 9, 10], [1, 2]), admission(1, [5, 6, 7, 8, 1, 2], [1, 3], computed=4)),
        ),
    )
    assert tokens == mock_tokens([5, 6, 7, 8, 1, 2], 1, 1, 1000) + mock_tokens([5, 6, 7, 8, 9, 10], 0, 1, 1000)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (plan(1, {1: 4}, admitted=(admission(1, [1, 2, 3], [3]),)), "a token that does not exist yet"),
        (plan(1, {0: 2}), "more drafts than are verified"),
        (plan(1, {0: 1}, decodes=0), "a decode for a prompt"),
        (plan(1, {1: 3}, decodes=1, admitted=(admission(1, [1, 2, 3], [3]),)), "a prompt is taken for a decode"),
        (plan(1, {1: 2}, admitted=(admission(1, [1, 2, 3], [3]),)), "sampling before the end"),
        (plan(1, {1: 3}, admitted=(admission(1, [1, 2, 3], [0]),)), "null block is written"),
        (plan(1, {0: 3}, admitted=(admission(0, [1, 2, 3], [3]),)), "the slot is taken"),
        (plan(2, {0: 1}), "plans out of order"),
    ],
)
def test_it_notices_a_plan_that_makes_no_sense(broken: StepPlan, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(started(), broken)


def test_it_notices_a_slot_scheduled_twice() -> None:
    twice = plan(1, {0: 1, 1: 1})
    twice.slots[1] = 0
    with pytest.raises(AssertionError, match="scheduled twice"):
        run(started(), twice)


def test_a_block_table_that_is_too_short_or_a_slot_given_back_is_an_error() -> None:
    mock = started()
    run(mock, plan(1, {0: 1})), run(mock, plan(2, {0: 1}))
    with pytest.raises(IndexError):
        run(mock, plan(3, {0: 1}))  # the ninth token needs a third block
    with pytest.raises(KeyError):
        run(started(), plan(1, {0: 1}, released=[0]))


def test_it_notices_more_steps_in_flight_than_its_depth() -> None:
    mock = started(depth=2)
    mock.submit(plan(1, {0: 1})), mock.submit(plan(2, {0: 1}))
    with pytest.raises(AssertionError, match="more steps in flight"):
        mock.submit(plan(3, {0: 1}))


def test_a_step_is_collected_only_after_its_release() -> None:
    mock = started(depth=2)
    mock.submit(plan(1, {0: 1}))
    with pytest.raises(KeyError):
        mock.collect()


# --- the same faults, planted in the engine -----------------------------------------------------------------------


def busy(rig: Any) -> None:
    for i in range(6):
        rig.add([*range(9), i], 12)
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


def test_the_harness_is_green_without_a_fault(Rig: Any, depth: int) -> None:
    busy(Rig(depth, blocks=14))


def test_a_pool_that_gives_a_block_twice_is_noticed(Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take, rig = BlockPool.take, Rig(depth, blocks=14)
    monkeypatch.setattr(BlockPool, "take", lambda pool, num: [1] if num == 1 else take(pool, num))
    rig.core.check = lambda: None
    with pytest.raises(AssertionError, match=OTHERS):
        busy(rig)


def test_a_prefix_that_matches_too_much_is_noticed(Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of one position is the same: a hash that ignores the tokens."""
    monkeypatch.setattr("quire.kv.hashing.sha256", lambda data: _Constant())
    rig = Rig(depth, blocks=30)
    rig.core.check = lambda: None
    with pytest.raises(AssertionError, match=OTHERS):
        for i in range(6):
            rig.add([i] * 10, 6)
        rig.drain()


class _Constant:
    def digest(self) -> bytes:
        return bytes(32)

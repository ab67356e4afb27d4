"""Decodes that advance by several tokens: the plan holds upper bounds, what follows holds what was confirmed."""

import re
from typing import Any

import numpy as np
import pytest

from quire.contracts.request import FinishReason, RequestState
from quire.contracts.step import MAX_VERIFY_ROWS, SAMPLE, RowLogprobs, StepPlan, StepResult

from ...support.mock_tokens import mock_tokens

K = 3


def rows_of(plan: StepPlan) -> list[int]:
    """Of the decodes of a plan."""
    return plan.num_tokens[: plan.num_decodes].tolist()


def test_a_step_advances_a_decode_by_as_many_as_were_right(Rig: Any) -> None:
    rig = Rig(drafts=K, accepts=(3, 0, 1, 2))
    handle = rig.add([1, 2, 3], 30)
    lengths = []
    while rig.core.has_work:
        rig.step()
        lengths.append(len(rig.tokens[handle]))
    assert lengths[:6] == [1, 5, 6, 8, 11, 15]
    rig.judge(handle)


def test_rows_are_planned_as_what_they_are(Rig: Any, depth: int) -> None:
    """A chunk of one token is a chunk; a decode asks for the logits of all of its rows."""
    rig = Rig(depth, drafts=K, accepts=(1,), budget=9)
    rig.add(range(9), 20), rig.add(range(50, 68), 20)
    rig.drain()
    chunks = [(p.num_decodes, p.num_tokens.tolist(), p.num_rows.tolist(), p.outputs.tolist()) for p in rig.plans[:4]]
    assert (
        chunks
        == [
            (0, [9], [1], [SAMPLE]),
            (1, [4, 8], [4, 0], [SAMPLE, 0]),
            (1, [4, 8], [4, 0], [SAMPLE, 0]),
            (1, [4, 2], [4, 1], [SAMPLE, SAMPLE]),
        ]
        or depth == 2
    )
    single = Rig(depth, drafts=K, budget=8)
    single.add(range(9), 20)
    single.step(3)
    assert [(p.num_decodes, p.num_tokens.tolist()) for p in single.plans[:3]] == [(0, [8]), (0, [1]), (1, [4])]


def test_drafts_end_where_the_request_may(Rig: Any, depth: int) -> None:
    """No row goes past the length at which the request is finished, whatever comes of the steps in flight."""
    rig = Rig(depth, drafts=K, accepts=(3, 0))
    handle = rig.add([1, 2, 3], 8)
    while rig.core.has_work:
        rig.step()
        if (request := rig.requests.get(handle)) is not None:
            assert rig.table.upper_bound[request.slot] <= request.end == 11
    assert [rows_of(p) for p in rig.plans if p.num_decodes] == [[4], [3], [2]]
    rig.judge(handle)


def test_a_slot_at_its_bound_waits_for_what_is_in_flight(Rig: Any) -> None:
    """At depth 2 the bound comes to the end; nothing of the drafts was right, so it goes on when that is known."""
    rig = Rig(2, drafts=K, accepts=(0,))
    handle = rig.add([1, 2, 3], 6)
    rig.drain()
    rig.judge(handle)
    assert [rows_of(p) for p in rig.plans if p.num_decodes] == [[4], [1], [3], [2], [1]]


@pytest.mark.parametrize(("running", "rows"), [(256, 4), (257, 3), (512, 2), (513, 1), (1100, 1)])
def test_drafts_of_many_fit_into_the_rows_of_a_step(Rig: Any, running: int, rows: int) -> None:
    rig = Rig(slots=running, blocks=2 * running, budget=2 * running, drafts=K, accepts=(1,))
    rig.core.check = lambda: None
    for i in range(running):
        rig.add([i], 6)
    rig.step(2)
    decodes = rows_of(rig.plans[1])
    assert decodes == [rows] * running and (sum(decodes) <= MAX_VERIFY_ROWS or rows == 1)


def test_prompts_keep_their_budget_beside_drafts(Rig: Any, depth: int) -> None:
    """Also those that are admitted."""
    rig = Rig(depth, drafts=K, budget=8)
    for i in range(4):
        rig.add([i], 20)
    rig.step()
    rig.add(range(10, 13), 20), rig.add(range(50, 60), 20)
    rig.step()
    assert rig.plans[1].num_decodes == 4 and rig.plans[1].num_tokens.tolist() == [4] * 4 + [3, 1]
    rig.step()
    assert rig.plans[2].num_tokens.tolist()[rig.plans[2].num_decodes :] == [3]
    rig.drain()


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_stop_id_drops_the_rest_of_its_run(Rig: Any, depth: int, at: int) -> None:
    prompt = [1, 2, 3]
    answer = mock_tokens(prompt, 0, 20, 1000)
    rig = Rig(depth, drafts=K, accepts=(3,))
    handle = rig.add(prompt, 20, stop_ids=(answer[at],))
    rig.drain()
    assert rig.tokens[handle] == answer[: at + 1]
    assert (rig.finish[handle].reason, rig.finish[handle].stop_id) == (FinishReason.STOP, answer[at])


def test_min_tokens_are_counted_inside_a_run(Rig: Any, depth: int) -> None:
    prompt = [1, 2, 3]
    answer = mock_tokens(prompt, 0, 20, 3)
    for least in range(8):
        rig = Rig(depth, vocab=3, drafts=K, accepts=(3, 2))
        handle = rig.add(prompt, 20, stop_ids=(0, 1, 2), min_tokens=least)
        rig.drain()
        assert rig.tokens[handle] == answer[: least + 1], f"min_tokens={least}"


def finish_of(Rig: Any, run: list[int], *, counts: int | None = None, **fields: Any) -> Any:
    """A rig whose one request gets its first token, 2, and then `run` in one step."""
    rig = Rig(vocab=7)
    handle = rig.add([1], 20, **fields)
    while not rig.tokens[handle]:
        rig.step()
    core, collect = rig.core, rig.mock.collect

    def scripted() -> StepResult:
        result = collect()
        rows = np.arange(len(run), dtype=np.int32)
        return StepResult(
            step=result.step,
            slots=result.slots,
            tokens=np.array([run], np.int32),
            num_accepted=np.array([len(run) if counts is None else counts], np.int32),
            logprobs={int(result.slots[0]): RowLogprobs(rows[:, None], -rows[:, None].astype(np.float32), rows)},
        )

    rig.mock.collect = scripted
    planned = core.scheduler.plan(core._step)
    planned.most = np.array([4], np.int32)
    slot = int(planned.sampling[0])
    rig.table.planned[slot] += 3
    rig.table.upper_bound[slot] += 3
    core.submit(planned)
    if core.needs_masks:
        core.send_masks()
    rig.outputs = core.confirm()
    rig._record(rig.outputs)
    return rig


def test_a_form_that_ends_inside_a_run_drops_the_rest(Rig: Any) -> None:
    """Every token of a run advances the grammar, and none behind its end does."""
    letter = mock_tokens([1], 0, 1, 7)[0]  # with the first token a run must fit, whatever the mask made of it
    rig = finish_of(Rig, [0, 1, 2, 0], grammar='{"regex": "[a-g]abc"}')
    assert letter >= 0 and rig.tokens[0][1:] == [0, 1, 2]
    assert rig.finish[0].reason is FinishReason.STOP and rig.finish[0].stop_id is None
    (rows,) = rig.outputs.logprobs.values()
    assert rows.ids[:, 0].tolist() == [0, 1, 2], "a row for each token that counts"


def test_a_run_that_a_form_forbids_fails_its_request(Rig: Any) -> None:
    rig = finish_of(Rig, [0, 5, 2, 0], grammar='{"regex": "[a-g]abc"}')
    assert rig.finish[0].error == "grammar_failed" and rig.tokens[0][1:] == [0, 5]


@pytest.mark.parametrize(("run", "counts"), [([0, 1], 0), ([0, 1], 5), ([0, 7], 2), ([-1, 0], 2)])
def test_a_run_that_cannot_be_fails_its_request_alone(Rig: Any, run: list[int], counts: int) -> None:
    rig = finish_of(Rig, run, counts=counts)
    assert rig.finish[0].error == "bad_token" and len(rig.tokens[0]) == 1


def test_what_stands_behind_the_tokens_that_count_means_nothing(Rig: Any) -> None:
    rig = finish_of(Rig, [0, 1, 99, -1], counts=2)
    assert rig.tokens[0][1:] == [0, 1] and not rig.finish


# --- blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_blocks_are_indexed_when_a_run_goes_past_their_end(Rig: Any, depth: int, right: int) -> None:
    """A run that ends behind a block's border completes the block, wherever it ends; a later turn finds it."""
    rig = Rig(depth, drafts=K, accepts=(right,))
    first = rig.add(range(6), 22)  # with three right drafts no run ends on a border
    rig.drain()
    second = rig.add([*range(6), *rig.tokens[first], 5], 2)
    rig.drain()
    assert rig.cached[second] == 24 and rig.mock.computed[str(second)] == 6
    rig.judge(first), rig.judge(second)


def test_drafts_that_were_wrong_are_in_no_block_that_is_found(Rig: Any, depth: int) -> None:
    """Blocks are there for all rows of the steps in flight, and only those full of confirmed tokens have a key."""
    rig = Rig(depth, drafts=K, accepts=(0, 2, 1))
    handle = rig.add(range(7), 40)
    while handle not in rig.finish:
        rig.step()
        if (request := rig.requests.get(handle)) is None or request.slot < 0:
            continue
        slot, table = request.slot, rig.allocator.table(request.slot)
        assert rig.allocator.capacity[slot] >= rig.table.upper_bound[slot] - 1
        keyed = [rig.pool.key(block) is not None for block in table]
        assert keyed == [4 * (i + 1) < len(request.tokens) for i in range(len(table))]
    rig.judge(handle)


@pytest.mark.parametrize("accepts", [(0,), (3,), (1, 3, 0), (2, 0)])
def test_a_request_that_gives_way_keeps_its_run_in_flight(Rig: Any, accepts: tuple[int, ...]) -> None:
    rig = Rig(2, blocks=9, budget=32, drafts=K, accepts=accepts)
    first, second = rig.add(range(12), 16), rig.add(range(50, 62), 16)
    while rig.scheduler.num_preempted == 0:
        before = len(rig.tokens[second])
        rig.step()
    request = rig.request(second)
    assert request.state is RequestState.WAITING and request.in_flight == 0
    assert len(rig.tokens[second]) > before and list(request.tokens) == [*range(50, 62), *rig.tokens[second]]
    rig.drain()
    rig.judge(first), rig.judge(second)


def test_a_request_that_gives_way_can_end_inside_its_run_in_flight(Rig: Any) -> None:
    prompt = list(range(50, 62))
    answer = mock_tokens(prompt, 1, 16, 1000)
    for at in range(2, 12):
        rig = Rig(2, blocks=9, budget=32, drafts=K, accepts=(3, 1))
        rig.add(range(12), 16), rig.add(prompt, 16, stop_ids=(answer[at],))
        rig.drain()
        rig.judge(0), rig.judge(1)


def test_an_abort_forgets_the_run_in_flight(Rig: Any, depth: int) -> None:
    rig = Rig(depth, drafts=K, accepts=(3,))
    keeps, goes = rig.add([1, 2, 3], 20), rig.add([4, 5, 6], 20)
    rig.step(2)
    before = list(rig.tokens[goes])
    rig.abort(goes)
    rig.drain()
    assert rig.tokens[goes] == before and rig.finish[goes].reason is FinishReason.ABORT
    rig.judge(keeps)


@pytest.mark.parametrize(("blocks", "lead"), [(5, 4), (7, 2)])
def test_no_request_is_preempted_for_drafts(Rig: Any, blocks: int, lead: int) -> None:
    """The pool is large enough without drafts, of which none is right. At depth 2 those in flight count, too."""
    for drafts in (0, K):
        rig = Rig(1, drafts=drafts, accepts=(0,), blocks=blocks, slots=2)
        handles = [rig.add([1, 2, 3, 4], 8 if blocks == 5 else 10)]
        rig.step(lead)
        handles.append(rig.add([5, 6, 7, 8], 12))
        rig.drain()
        for handle in handles:
            rig.judge(handle)
        assert not rig.scheduler.num_preempted, drafts


@pytest.mark.parametrize("cached", [True, False])
def test_a_block_is_published_when_drafters_have_written_their_part(Rig: Any, cached: bool) -> None:
    """A drafter with a cache writes its entries of a run in the next step: a block that a run fills waits for that."""
    rig = Rig(drafts=K, accepts=(3,), block_size=4)
    rig.core.scheduler.drafts.cached = cached
    handle = rig.add(range(5), 30)
    published, before = [], 0
    for _ in range(6):
        rig.step()
        known = 5 + len(rig.tokens[handle])
        run, before = known - 5 - before, known - 5
        if run > 1:
            published.append(int(rig.allocator.published[0]))
            assert published[-1] == (known - (run if cached else 1)) // 4
    assert published == ([1, 2, 3, 4, 5] if cached else [2, 3, 4, 5, 6])


# --- requests with a grammar ----------------------------------------------------------------------------------------


def test_a_grammar_s_forced_tokens_are_drafts_that_are_always_right(Rig: Any, depth: int) -> None:
    rig = Rig(depth, vocab=7, drafts=K)
    handle = rig.add([1, 2], 30, grammar='{"regex": "abcdefabcdef"}')
    rig.drain()
    rig.judge(handle)
    assert [rows_of(p) for p in rig.plans] == [[], [4], [4], [3]]
    assert rig.finish[handle].drafts == (8, 3, 3, 2)


def test_drafts_under_a_grammar_are_n_grams_that_it_allows(Rig: Any, depth: int) -> None:
    rig = Rig(depth, vocab=7, drafts=K)
    free = rig.add([5, 5, 5], 40)
    handle = rig.add([0, 1, 2, 0, 3, 4, 0, 1, 2], 40, grammar='{"regex": "([abcd]{3}e?)*"}')
    rig.drain()
    rig.judge(handle), rig.judge(free)
    made, *right = rig.finish[handle].drafts
    assert made > 10 and 0 < sum(right) < made
    drafts = [each for plan in rig.plans for each in plan.drafts]
    assert {each.slot for each in drafts} == {1} and sum(len(each.tokens) for each in drafts) >= made
    if depth == 1:  # at depth 2 a draft may stand behind a token that came otherwise
        text = [*rig.prompts[handle], *rig.tokens[handle]]
        for each in drafts:
            whole = "".join("abcdefg"[token] for token in [*text[9 : each.position], *each.tokens])
            assert re.fullmatch("([abcd]{3}e?)*[abcd]{0,2}", whole)


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 6])
def test_reasoning_ends_at_its_budget_inside_a_run(Rig: Any, depth: int, budget: int) -> None:
    for kind in ('"regex": "a{3}b", ', ""):
        rig = Rig(depth, vocab=7, drafts=K)
        handles = [
            rig.add(
                [0, 1, 0, 1, 0, 1, seed % 3],
                20,
                seed=seed,
                stop_ids=(0, 6),
                grammar=f'{{{kind}"after": "ccc", "budget": {budget}}}',
            )
            for seed in range(6)
        ]
        rig.drain()
        for handle in handles:
            rig.judge(handle)
        assert sum(sum(rig.finish[handle].drafts[1:]) for handle in handles) >= 2 * len(handles), "the end is forced"


def test_n_grams_under_a_grammar_stop_if_they_are_not_worth_the_waiting(Rig: Any, depth: int) -> None:
    """At depth 2 a request with drafts in flight misses a step. Forced tokens go on as drafts."""
    rig = Rig(depth, vocab=7, drafts=K)
    handle = rig.add([0, 1, 2, 0, 3, 2, 1], 90, grammar='{"regex": "[abcd]{50}efefefef[abcd]{20}"}')
    rig.drain()
    rig.judge(handle)
    found = [each.position - 7 for plan in rig.plans for each in plan.drafts]
    assert sum(30 < at < 48 for at in found) > 5 or depth == 2
    assert any(50 < at < 58 for at in found) and (depth == 1 or not any(30 < at < 48 or at > 60 for at in found))


def test_min_tokens_are_counted_inside_a_run_under_a_grammar(Rig: Any, depth: int) -> None:
    for least in range(2, 9):
        rig = Rig(depth, vocab=7, drafts=K)
        handles = [
            rig.add([0, 1, 0, 1, 0, 1], 20, seed=seed, grammar='{"regex": "(ab)*"}', stop_ids=(4,), min_tokens=least)
            for seed in range(4)
        ]
        rig.drain()
        for handle in handles:
            rig.judge(handle)


@pytest.mark.parametrize("drafts", [0, K])
@pytest.mark.parametrize("failing", [False, True])
def test_a_text_that_must_end_behind_a_draft_ends_there(Rig: Any, depth: int, drafts: int, failing: bool) -> None:
    """The mask tells it, in a run as in single tokens."""
    rig = Rig(depth, vocab=7, drafts=drafts)
    masks = rig.compiler.masks

    class Failed:
        """A matcher whose limits are reached."""

        def is_error(self) -> bool:
            return failing

        def get_error(self) -> str:
            return "too wide"

    def ending(matchers: list[Any], enders: list[Any]) -> Any:
        words, over = masks(matchers, enders)
        more = [row for row, each in enumerate(matchers) if each is not None and each.compute_ff_bytes() == b"ef"]
        for row in more:
            words[row], matchers[row] = -1, Failed()
        return words, sorted({*over, *more})

    rig.compiler.masks = ending
    handle = rig.add([1, 2], 30, grammar='{"regex": "abcdef"}')
    rig.drain()
    finish = rig.finish[handle]
    assert rig.tokens[handle] == [0, 1, 2, 3]
    assert finish.reason is (FinishReason.ERROR if failing else FinishReason.STOP)
    assert failing == ("the grammar failed: too wide" in str(finish.message))
    assert max(max(rows_of(plan), default=1) for plan in rig.plans) == 1 + drafts

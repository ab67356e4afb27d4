"""Requests with a grammar: compiled beside the loop, masked by the token before, ended by their grammar or alone."""

import re
import time
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.answers import grammar as text_grammar
from quire.answers.grammar import GrammarCompiler
from quire.config.engine import SchedulerConfig
from quire.contracts.errors import InvalidParameter, QueueFull, RequestFailed
from quire.contracts.request import BlockReason, FinishReason, RequestState
from quire.contracts.structured import StructuredOutputsParams
from quire.engine import grammar as engine_grammar
from quire.engine.core import EngineCore
from quire.engine.grammar import Grammars

from ...support.byte_tokenizer import ByteTokenizer

LETTERS, VOCAB = "abcdefg", 7


def spec_of(**fields: Any) -> str:
    return StructuredOutputsParams(**fields).spec()


def text(rig: Any, handle: int) -> str:
    return "".join(LETTERS[token] for token in rig.tokens[handle])


def small(rig_class: Any, depth: int, **sizes: Any) -> Any:
    return rig_class(depth, vocab=VOCAB, **sizes)


@pytest.mark.parametrize(
    "spec, pattern",
    [
        (spec_of(regex="[ab]{3}c+d"), "[ab]{3}c+d"),
        (spec_of(choice=["abba", "cafe", "face"]), "abba|cafe|face"),
        (spec_of(grammar='root ::= "a" root "b" | "c"'), "a*cb*"),
    ],
)
def test_every_token_is_of_the_grammar(Rig: Any, depth: int, spec: str, pattern: str) -> None:
    """Beside requests that are free, which get what they would have got without."""
    rig = small(Rig, depth)
    formed = [rig.add([i % 3, 1], 20, seed=i, grammar=spec) for i in range(6)]
    free = [rig.add([i % 3, 1], 6, seed=i) for i in range(3)]
    rig.drain()
    for handle in (*formed, *free):
        rig.judge(handle)
    ended = [handle for handle in formed if rig.finish[handle].reason is FinishReason.STOP]
    assert ended and all(re.fullmatch(pattern, text(rig, handle)) for handle in ended)
    assert not any(re.fullmatch(pattern, text(rig, handle)) for handle in free)
    assert all(rig.finish[handle].stop_id is None for handle in ended)


@pytest.mark.parametrize(
    "grammar, order", [(None, "S0 R0 S1 R1 C0 S2 R2 C1"), (spec_of(regex="a{9}"), "S0 R0 S1 C0 R1 S2 C1 R2")]
)
def test_the_step_before_is_collected_before_masks_are_made(Rig: Any, grammar: str | None, order: str) -> None:
    """Two in flight. Without a grammar nothing waits for a token."""
    rig, log = small(Rig, 2), []
    submit, release, collect = rig.mock.submit, rig.mock.release, rig.mock.collect
    rig.mock.submit = lambda plan: (log.append(f"S{plan.step}"), submit(plan))
    rig.mock.release = lambda step, masks: (log.append(f"R{step}"), release(step, masks))
    rig.mock.collect = lambda: (result := collect(), log.append(f"C{result.step}"))[0]
    handle = rig.add([1, 2], 4, grammar=grammar)
    rig.drain()
    assert " ".join(log).startswith(order)
    rig.judge(handle)


def test_only_rows_that_sample_have_masks(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth, budget=4)
    rig.add([1] * 11, 3, grammar=spec_of(regex="a{9}"))
    rig.add([2] * 3, 9)
    rig.drain()
    found, formed = [], -1
    for plan in rig.plans:
        formed = next((a.slot for a in plan.admitted if len(a.token_ids) == 11), formed)
        found += [(rows, formed in plan.grammar) for rows in plan.num_rows[plan.slots == formed].tolist()]
    assert {rows > 0 for rows, _ in found} == {False, True} and all((rows > 0) == masked for rows, masked in found)
    assert sum(len(plan.grammar) for plan in rig.plans) == 3


def test_it_waits_for_its_grammar_and_nobody_else_does(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    jobs, rig.jobs.jobs = rig.jobs.jobs, rig.jobs.jobs.__class__()
    slow = rig.add([1], 3, grammar=spec_of(regex="a{3}"))
    jobs.extend(rig.jobs.jobs), rig.jobs.jobs.clear()
    other = rig.add([1], 3)
    rig.step(6)
    request = rig.request(slow)
    assert (request.state, request.blocked_on) == (RequestState.BLOCKED, BlockReason.GRAMMAR)
    assert rig.outputs.stats.num_blocked == 1 and rig.finish[other].reason is FinishReason.LENGTH
    rig.jobs.jobs.extend(jobs)
    rig.drain()
    assert text(rig, slow) == "aaa" and rig.finish[slow].reason is FinishReason.STOP


@pytest.mark.parametrize("how", ["abort", "deadline", "too slow"])
def test_a_request_may_end_while_its_grammar_is_compiled(Rig: Any, depth: int, how: str) -> None:
    rig = small(Rig, depth)
    rig.jobs.run_one = lambda: None
    handle = rig.add([1], 3, grammar=spec_of(regex="a{3}"), deadline=5.0 if how == "deadline" else None)
    child = rig.add([1], 3, grammar=spec_of(regex="a{3}"), parent=handle)
    assert rig.request(child).blocked_on is BlockReason.PARENT and len(rig.jobs.jobs) == 1
    if how == "too slow":
        rig.step(), setattr(rig, "now", rig.now + 20.0), rig.step(2)
        assert handle not in rig.finish, "it waited for others, and its own has not begun"
        rig.jobs.jobs[0][0].set_running_or_notify_cancel()
    rig.step()
    if how == "abort":
        rig.abort(handle)
        assert rig.request(child).blocked_on is BlockReason.GRAMMAR
        rig.abort(child)
    rig.now += 20.0
    rig.step(2)
    if how == "deadline":
        rig.abort(child), rig.step()  # which has none
    finish = rig.finish[handle]
    assert (finish.reason, finish.error) == {
        "abort": (FinishReason.ABORT, None),
        "deadline": (FinishReason.ERROR, "deadline"),
        "too slow": (FinishReason.ERROR, "invalid_grammar"),
    }[how]
    assert how != "too slow" or "not compiled within 10 s" in finish.message
    assert rig.finish.keys() == {handle, child} and len(rig.core._grammars) == 0
    assert how == "too slow" or rig.jobs.jobs[0][0].cancelled(), "nobody waits for it, and it is compiled"
    rig.jobs.jobs.clear()
    del rig.jobs.run_one
    again = rig.add([1], 3, grammar=spec_of(regex="a{3}"))
    rig.drain()
    assert text(rig, again) == "aaa"


def test_only_so_many_wait_to_be_compiled(Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_grammar, "MOST_WAITING", 2)
    rig = small(Rig, depth)
    for letter in "ab":
        rig.add([1], 3, grammar=spec_of(regex=letter))
    with pytest.raises(QueueFull, match="2 requests wait for grammars"):
        rig.add([1], 3, grammar=spec_of(regex="c"))
    offline = rig.add([1], 3, grammar=spec_of(regex="c"), places=0)
    rig.core.check()
    known = rig.add([1], 3, grammar=spec_of(regex="a"))  # is compiled anyway
    rig.drain()
    assert text(rig, known) == "a" and text(rig, offline) == "c"


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    bad = rig.add([1], 5, grammar=spec_of(regex="(a"))
    child = rig.add([1], 5, grammar=spec_of(regex="(a"), parent=bad)
    good = rig.add([1], 5, grammar=spec_of(regex="a{5}"))
    rig.drain()
    for handle in (bad, child):
        finish = rig.finish[handle]
        assert (finish.reason, finish.error) == (FinishReason.ERROR, "invalid_grammar")
        assert "unclosed group" in finish.message and rig.tokens[handle] == []
    assert text(rig, good) == "aaaaa"


def test_a_passing_fault_is_no_fault_of_the_grammar(Rig: Any, depth: int) -> None:
    """A later request with the same grammar has it compiled; a faulty grammar is refused again."""
    rig = small(Rig, depth)
    load = rig.compiler._load

    def busy() -> None:
        raise RequestFailed("busy", code="internal")

    rig.compiler._load = busy
    first = rig.add([1], 5, grammar=spec_of(regex="a{5}"))
    rig.drain()
    assert (rig.finish[first].error, rig.finish[first].message) == ("internal", "busy")
    rig.compiler._load = load
    again, bad = rig.add([1], 5, grammar=spec_of(regex="a{5}")), rig.add([1], 5, grammar=spec_of(regex="(a"))
    rig.drain()
    done = rig.jobs.num_done
    rig.add([1], 5, grammar=spec_of(regex="(a"))
    rig.drain()
    assert text(rig, again) == "aaaaa" and rig.finish[bad].error == "invalid_grammar" and rig.jobs.num_done == done


def test_a_fault_in_compiling_is_told_without_its_details(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    rig.compiler._load = lambda: 1 / 0
    handle = rig.add([1], 5, grammar=spec_of(regex="a"))
    rig.drain()
    assert rig.finish[handle].error == "internal" and "zero" not in rig.finish[handle].message


def test_a_matcher_that_gives_up_ends_its_request_alone(Rig: Any, depth: int) -> None:
    """An ambiguous grammar reaches its limits after some tokens; what it shared is not handed to the next."""
    rig = small(Rig, depth)
    rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(60)]
    spec = spec_of(grammar="\n".join(["start: a0", *rules, 'a60: "a" | ']))
    doomed, good = rig.add([1], 40, grammar=spec), rig.add([2], 40, grammar=spec_of(regex="b{99}"))
    rig.drain()
    finish = rig.finish[doomed]
    assert (finish.reason, finish.error) == (FinishReason.ERROR, "grammar_failed")
    assert "Current row has" in finish.message
    assert set(text(rig, doomed)) == {"a"} and text(rig, good) == "b" * 40
    assert spec not in rig.core._grammars._cache and spec_of(regex="b{99}") in rig.core._grammars._cache


def test_a_token_that_the_grammar_forbids_ends_its_request_alone(Rig: Any, depth: int) -> None:
    """A device that does not do as the mask says."""
    rig = small(Rig, depth)
    run = rig.mock._run
    rig.mock._run = lambda plan, masks: run(plan, {slot: mask for slot, mask in masks.items() if plan.step < 3})
    wild = rig.add([1], 30, grammar=spec_of(regex="[ab]{30}"))
    rig.drain()
    assert rig.finish[wild].error == "grammar_failed" and set(text(rig, wild)[:-1]) <= set("ab")


def test_nothing_left_to_sample_fails_the_request_alone(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    run = rig.mock._run
    rig.mock._run = lambda plan, masks: run(plan, {slot: mask & 0 for slot, mask in masks.items()})
    none, other = rig.add([1], 5, grammar=spec_of(regex="a{9}")), rig.add([1], 5)
    rig.drain()
    assert rig.finish[none].error == "no_token" and rig.finish[other].reason is FinishReason.LENGTH


def test_completions_of_one_prompt_have_matchers_of_their_own(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    spec = spec_of(regex="([abc]{4}d?){2}")
    first = rig.add([1, 2, 0, 1, 2], 12, seed=0, grammar=spec)
    others = [rig.add([1, 2, 0, 1, 2], 12, seed=seed, grammar=spec, parent=first) for seed in range(1, 6)]
    rig.drain()
    for handle in (first, *others):
        rig.judge(handle)
    assert len({text(rig, handle) for handle in (first, *others)}) > 3 and rig.jobs.num_done == 1


def test_a_preempted_request_goes_on_in_its_grammar(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth, blocks=12, slots=4)
    handles = [rig.add([i % 3] * 5, 25, seed=i, grammar=spec_of(regex="([ab]c){30}|[efd]{30}")) for i in range(4)]
    rig.drain()
    assert rig.scheduler.num_preempted > 0
    for handle in handles:
        rig.judge(handle)
        assert re.fullmatch(r"([ab]c){12}[ab]|[efd]{25}", text(rig, handle))


def test_before_the_text_that_ends_the_reasoning_everything_may_come(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    handles = [rig.add([i % 3], 60, seed=i, grammar=spec_of(regex="a{3}b", after="cc")) for i in range(8)]
    rig.drain()
    for handle in handles:
        rig.judge(handle)
    answers = [text(rig, handle).partition("cc") for handle in handles]
    assert all(answer == "aaab" for _, found, answer in answers if found) and sum(bool(a[1]) for a in answers) > 3
    assert any(set(before) > set("ab") for before, _, _ in answers)


@pytest.mark.parametrize("stop_ids, min_tokens", [((), 0), ((0, 6), 0), ((1,), 9)])
def test_reasoning_ends_at_its_budget_and_not_before_its_end(
    Rig: Any, depth: int, stop_ids: tuple[int, ...], min_tokens: int
) -> None:
    """With a grammar and without; what stops an output stops none that reasons, and all that may come is its end."""
    rig = small(Rig, depth)
    inside = {"grammar": 'start: t "aaab"\nt[suffix="ccc"]: /[b-d]*/', "inside": True}
    kinds = [({"regex": "a{3}b"}, 4), ({"regex": "a{3}b"}, 0), ({}, 4), ({}, 50), (inside, 4)]
    handles = {
        rig.add(
            [seed % 3],
            30,
            seed=seed,
            grammar=spec_of(after="ccc", budget=budget, **kind),
            stop_ids=stop_ids,
            min_tokens=min_tokens,
        ): (kind, budget)
        for kind, budget in kinds
        for seed in range(4)
    }
    rig.drain()
    for handle, (kind, budget) in handles.items():
        rig.judge(handle)
        before, found, answer = text(rig, handle).partition("ccc")
        if budget == 50:
            assert found or len(before) == 30 and rig.finish[handle].reason is FinishReason.LENGTH
        else:
            assert found and len(before) <= budget and (not kind or stop_ids or answer == "aaab")
            assert not kind.get("inside") or set(before) <= set("bcd")


@pytest.mark.parametrize(
    "stop_ids, min_tokens, expected",
    [
        ((), 0, ("aaa", None)),
        ((3,), 0, ("aaa", None)),
        ((3,), 2, ("aaa", None)),
        ((3,), 9, ("aaa", None)),
    ],
)
def test_a_finished_form_ends_the_output_whatever_stops_it_otherwise(
    Rig: Any, depth: int, stop_ids: tuple[int, ...], min_tokens: int, expected: tuple[str, int | None]
) -> None:
    """With the end of sequence ignored, and before min_tokens."""
    rig = small(Rig, depth)
    handle = rig.add([1], 20, grammar=spec_of(regex="a{3}"), stop_ids=stop_ids, min_tokens=min_tokens)
    rig.drain()
    assert (text(rig, handle), rig.finish[handle].stop_id) == expected
    assert rig.finish[handle].reason is FinishReason.STOP


def test_a_stop_id_may_come_where_the_form_may_end_and_not_before_min_tokens(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    handles = [rig.add([1], 20, seed=i, grammar=spec_of(regex="(ab)*"), stop_ids=(4,), min_tokens=3) for i in range(8)]
    rig.drain()
    for handle in handles:
        rig.judge(handle)
        assert re.fullmatch("(ab){2,}(e|a?)", text(rig, handle))
    assert any(rig.finish[handle].stop_id == 4 for handle in handles)


def test_max_tokens_cuts_and_a_form_that_is_complete_then_has_stopped(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    cut, whole = (rig.add([1], count, grammar=spec_of(regex="a{4}")) for count in (3, 4))
    scored = rig.add([1, 2, 0], 0, scored=True, grammar=spec_of(regex="a{4}"))
    rig.drain()
    assert [rig.finish[h].reason for h in (cut, whole, scored)] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert text(rig, cut) == "aaa" and len(rig.rows[scored]) == 2


def test_a_form_of_nothing_ends_before_its_first_token(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    handle, other = rig.add([1], 4, grammar=spec_of(choice=[""])), rig.add([1], 4)
    rig.drain()
    assert rig.tokens[handle] == [] and rig.finish[handle].reason is FinishReason.STOP
    rig.judge(other)


def test_one_grammar_is_compiled_once_and_the_last_used_are_kept(Rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_grammar, "KEPT", 2)
    rig = small(Rig, 1)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        rig.add([1], 2, grammar=spec_of(regex=pattern))
        rig.drain()
    assert rig.jobs.num_done == 4
    assert list(rig.core._grammars._cache) == [spec_of(regex="a"), spec_of(regex="b")]


def test_the_more_forms_there_are_the_fewer_copies_has_each(Rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_grammar, "KEPT", 12)
    monkeypatch.setattr(text_grammar, "COPIES_SECONDS", 60)
    rig = small(Rig, 1)
    rig.compiler._threads = 99
    cache = rig.core._grammars._cache
    for pattern in "abcd":
        rig.add([1], 2, grammar=spec_of(regex=pattern))
    rig.drain()
    assert [future.result().copies for future in cache.values()] == [6, 3, 2, 1]
    rig.add([1], 2, grammar=spec_of(regex="ab"))  # alone again; and the oldest has no place beside it
    rig.drain()
    assert [future.result().copies for future in cache.values()] == [3, 2, 1, 6]


def test_an_engine_without_a_tokenizer_refuses(Rig: Any) -> None:
    rig = small(Rig, 1)
    rig.core = EngineCore(rig.mock, SchedulerConfig(max_num_seqs=8), rig.allocator, root_key=bytes(32))
    with pytest.raises(InvalidParameter, match="needs a tokenizer"):
        rig.add([1], 2, grammar=spec_of(regex="a"), stop_ids=(3,))
    assert not rig.core.handles and not rig.core._finisher._num_stopping.any()
    rig.core.check()


def test_threads_compile_and_an_idle_core_waits_for_them(Rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production: the threads, a nap of the loop, and an end of the threads with the core."""
    monkeypatch.undo()
    rig = small(Rig, 2)
    rig.core._grammars._pool, compile_now = None, rig.compiler.compile
    rig.compiler.compile = lambda *spec: (time.sleep(0.2), compile_now(*spec))[1]  # type: ignore[method-assign]
    handle, steps = rig.add([1], 3, grammar=spec_of(regex="a{3}")), 0
    while handle not in rig.finish:
        rig.step()
        steps += 1
    assert text(rig, handle) == "aaa" and steps < 2000
    rig.core.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        rig.core._grammars._pool.submit(print)


def test_masks_reach_the_device_in_the_order_of_the_plan(Rig: Any, depth: int) -> None:
    rig = small(Rig, depth)
    seen, release = [], rig.mock.release
    rig.mock.release = lambda step, masks: (seen.append(masks), release(step, masks))
    handles = [rig.add([1], 2, grammar=spec_of(regex=letter * 2)) for letter in "fbd"]
    for _ in handles:
        rig.jobs.run_one()
    rig.drain()
    masks = next(masks for masks in seen if len(masks) == 3)
    assert masks.dtype == np.int32 and masks[:, 0].tolist() == [1 << 5, 1 << 1, 1 << 3]
    assert [text(rig, handle) for handle in handles] == ["ff", "bb", "dd"]


@pytest.mark.parametrize("sampled", ["ab", "aX"])
def test_a_text_ends_behind_a_draft_only_if_the_draft_came(sampled: str) -> None:
    """Behind the drafts "aX" the reasoning has ended, and the output with it."""
    compiler = GrammarCompiler(ByteTokenizer, ByteTokenizer().vocab_size)
    grammars = Grammars(compiler)
    spec = StructuredOutputsParams(choice=[""], after="X").spec()
    sampler = SimpleNamespace(min_length=0)
    new: Any = SimpleNamespace(grammar=spec, handle=1, sampler=sampler, stop_ids=(257,))
    grammars.start(new, bounded=True)
    while not list(grammars.settled()):
        grammars.wait()
    request: Any = SimpleNamespace(new=new, tokens=array("i", [1]), num_prompt=1)
    assert not grammars.masks([(request, [*b"aX"])])[1]
    ended = [grammars.advance(1, token) for token in sampled.encode()]
    assert ended == [False, sampled == "aX"]
    grammars.close()

"""Columns of a step become outputs; what goes wrong with the text of one request stays with that request."""

import logging
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.contracts.chunks import Chunking
from quire.contracts.errors import InvalidParameter
from quire.contracts.output import Finish, StepOutputs
from quire.contracts.request import FinishReason, ReusedParts
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.contracts.step import RowLogprobs
from quire.entry.completion import Generation
from quire.entry.core_request import FrontLimits
from quire.entry.front_end import FrontEnd
from quire.entry.prompts import Prompt
from quire.plan.sharing import SharePlan
from quire.procs.front_ends import FrontPlace

from ...support.byte_tokenizer import ByteTokenizer

LIMITS = FrontLimits(max_model_len=100, vocab_size=300, max_logprobs=5, eos_ids=(257,))


@pytest.fixture
def front() -> FrontEnd:
    return FrontEnd(ByteTokenizer(), LIMITS)


def start(front: FrontEnd, **fields: Any) -> Generation:
    fields = {"output_kind": OutputKind.DELTA, "temperature": 1.0} | fields
    return front.start(Prompt(token_ids=[72, 73]), SamplingParams(**fields))[0]


def step(tokens: dict[int, int], *finished: Finish, **columns: Any) -> StepOutputs:
    return StepOutputs(
        handles=np.array(list(tokens), np.int32),
        tokens=np.array(list(tokens.values()), np.int32),
        finished=finished,
        **columns,
    )


def rows(token: int) -> RowLogprobs:
    return RowLogprobs(np.array([[token, 1]], np.int32), np.array([[-0.5, -1.0]], np.float32), np.array([2], np.int32))


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


def texts(pairs: list[tuple[int, Any]]) -> dict[int, str]:
    return {handle: output.outputs[0].text for handle, output in pairs}


def test_a_delta_holds_what_is_new_and_nothing_twice(front: FrontEnd) -> None:
    generation = start(front)
    pairs, _ = front.apply(step({0: ord("a")}))
    assert texts(pairs) == {0: "a"}
    front.take(step({0: ord("b")}))
    front.take(step({0: ord("c")}))  # nobody looked meanwhile
    output = generation.output()
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("bc", [98, 99])
    assert (generation.output().outputs[0].text, generation.output().outputs[0].token_ids) == ("", [])


def test_half_a_character_waits_and_shows_at_the_end(front: FrontEnd) -> None:
    start(front)
    first, second = "é".encode()
    assert texts(front.apply(step({0: first}))[0]) == {0: ""}
    pairs, _ = front.apply(step({0: second}))
    assert texts(pairs) == {0: "é"}
    pairs, _ = front.apply(step({0: first}, Finish(handle=0, reason=FinishReason.LENGTH)))
    assert texts(pairs) == {0: "\ufffd"} and pairs[0][1].finished


def test_delta_and_cumulative_say_the_same(front: FrontEnd) -> None:
    start(front, stop="cd")
    start(front, stop="cd", output_kind=OutputKind.CUMULATIVE)
    pieces, last = "", ""
    for char in b"abcxc":
        outputs, _ = front.apply(step({0: char, 1: char}))
        pieces += texts(outputs)[0]
        last = texts(outputs)[1]
        assert pieces == last
    outputs, stopped = front.apply(step({0: ord("d"), 1: ord("d")}))
    assert pieces + texts(outputs)[0] == texts(outputs)[1] == "abcx" and sorted(stopped) == [0, 1]
    assert len(front) == 0


def test_what_a_step_changed_is_told(front: FrontEnd) -> None:
    one, two = start(front), start(front)
    first = front.take(step({0: 65, 1: 65}))
    assert (first.num_tokens, first.started, first.gaps) == (2, [one, two], {})
    second = front.take(step({0: 65, 1: 65}, Finish(handle=1, reason=FinishReason.LENGTH)))
    assert second.gaps == {first.now: 2} and second.finished == [two] and second.started == []
    third = front.take(step({0: 65, 1: 65}))  # a late token of a request that has ended
    assert third.num_tokens == 1 and third.gaps == {second.now: 1}


def runs(tokens: dict[int, bytes], *finished: Finish, **columns: Any) -> StepOutputs:
    """A step that brings some requests several tokens."""
    return StepOutputs(
        handles=np.repeat(np.array(list(tokens), np.int32), list(map(len, tokens.values()))),
        tokens=np.frombuffer(b"".join(tokens.values()), np.uint8).astype(np.int32),
        finished=finished,
        **columns,
    )


def row_of(*tokens: int) -> RowLogprobs:
    return RowLogprobs(
        np.array(tokens, np.int32)[:, None], -np.array(tokens, np.float32)[:, None], np.ones(len(tokens), np.int32)
    )


def test_several_tokens_of_one_step_are_taken_in_order(front: FrontEnd) -> None:
    """Each with its own logprobs; they came together, so nobody waited for the later ones."""
    one, two, three = start(front, logprobs=0), start(front), start(front, logprobs=0)
    first = front.take(runs({0: b"ab", 1: b"x", 2: b"uvw"}, logprobs={0: row_of(97, 98), 2: row_of(117, 118, 119)}))
    assert (first.num_tokens, first.started, first.gaps) == (6, [one, two, three], {})
    assert [g.output().outputs[0].text for g in (one, two, three)] == ["ab", "x", "uvw"]
    assert [list(found) for found in one.completions[0].logprobs or ()] == [[97], [98]]
    assert three.completions[0].cumulative_logprob == -117 - 118 - 119
    second = front.take(runs({0: b"c", 2: b"xyz"}, logprobs={0: row_of(99), 2: row_of(120, 121, 122)}))
    assert second.gaps == {first.now: 2} and second.num_tokens == 4


def test_a_request_ends_with_the_last_of_several_tokens(front: FrontEnd) -> None:
    one, two = start(front), start(front, output_kind=OutputKind.CUMULATIVE)
    end = Finish(handle=1, reason=FinishReason.STOP, stop_id=ord("d"))
    pairs, stopped = front.apply(runs({0: b"abc", 1: b"abcd"}, end))
    assert texts(pairs) == {0: "abc", 1: "abc"} and stopped == [] and two.finished and not one.finished
    assert two.completions[0].token_ids == list(b"abcd") and two.completions[0].stop_reason == ord("d")


def test_a_stop_string_among_several_tokens_drops_the_rest(front: FrontEnd) -> None:
    one, two = start(front, stop="b", logprobs=0), start(front, logprobs=0)
    columns = {"logprobs": {0: row_of(97, 98, 99), 1: row_of(120, 121)}}
    pairs, stopped = front.apply(runs({0: b"abc", 1: b"xy"}, **columns))
    assert texts(pairs) == {0: "a", 1: "xy"} and stopped == [0] and one.finished
    assert [list(found) for found in one.completions[0].logprobs or ()] == [[97], [98]]
    assert [list(found) for found in two.completions[0].logprobs or ()] == [[120], [121]]


@pytest.mark.parametrize("where", ["text", "logprobs", "prompt_logprobs", "end", "output"])
def test_an_exception_over_the_text_of_one_request(
    front: FrontEnd, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    victim = start(front, logprobs=1, prompt_logprobs=1)
    other = start(front, logprobs=1)
    columns: dict[str, Any] = {"logprobs": {0: rows(65), 1: rows(65)}, "prompt_logprobs": {0: rows(73)}}
    finish: tuple[Finish, ...] = ()
    text: Any = victim.completions[0].text
    if where == "text":
        monkeypatch.setattr(text, "push", broken)
    elif where == "logprobs":
        monkeypatch.setattr(victim, "add_logprobs", broken)
    elif where == "prompt_logprobs":
        monkeypatch.setattr(victim, "add_prompt_logprobs", broken)
    elif where == "end":
        front.apply(step({0: 65, 1: 65}, **columns))
        columns, finish = {}, (Finish(handle=0, reason=FinishReason.ABORT),)
        monkeypatch.setattr(text._detokenizer, "flush", broken)
    else:
        monkeypatch.setattr(
            victim.completions[0].__class__,
            "output",
            lambda self, whole=victim.completions[0].__class__.output: broken() if self.text is text else whole(self),
        )
    with caplog.at_level(logging.ERROR):
        tokens = {1: 66} if where == "end" else {0: 66, 1: 66}
        pairs, stopped = front.apply(step(tokens, *finish, **columns))
    assert sum("planted" in (record.exc_text or "") for record in caplog.records) == 1
    outputs = dict(pairs)
    failed = outputs[0].outputs[0]
    assert outputs[0].finished and (failed.finish_reason, failed.stop_reason) == ("error", "internal")
    assert stopped == ([] if where == "end" else [0])  # the core has ended it by itself then
    assert outputs[1].outputs[0].text.endswith("B") and not outputs[1].finished
    later, stopped = front.apply(
        step({0: 67, 1: 67}, Finish(handle=1, reason=FinishReason.LENGTH), Finish(handle=0, reason=FinishReason.ABORT))
    )
    assert texts(later) == {1: "C"} and stopped == [] and len(front) == 0
    assert other.completions[0].finish_reason == "length"


def test_one_of_several_completions_fails_alone(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = start(front, n=2, output_kind=OutputKind.FINAL_ONLY)
    monkeypatch.setattr(generation.completions[1].text, "push", broken)
    assert front.apply(step({0: 65, 1: 65})) == ([], [])  # nobody has asked for the text yet
    (pair,), _ = front.apply(step({0: 66, 1: 66}, *(Finish(handle=i, reason=FinishReason.LENGTH) for i in (0, 1))))
    assert [c.finish_reason for c in pair[1].outputs] == ["length", "error"]
    assert pair[1].outputs[0].text == "AB"


def test_a_start_that_fails_keeps_nothing(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_text", broken)
    with pytest.raises(ZeroDivisionError):
        start(front, n=2)
    assert len(front) == 0


@pytest.mark.parametrize("options", [{"timeout": True}, {"priority": True}], ids=str)
def test_a_truth_value_is_no_number(options: dict[str, Any]) -> None:
    front = FrontEnd(None, FrontLimits(max_model_len=100, vocab_size=300, max_logprobs=5, by_priority=True))
    with pytest.raises(InvalidParameter, match=next(iter(options))):
        front.start(Prompt(token_ids=[72]), SamplingParams(), **options)
    assert len(front) == 0


EVERY = list(range(300))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"allowed_token_ids": [257], "min_tokens": 1},
            "allowed_token_ids",
            "allowed_token_ids and min_tokens .stop_to",
        ),
        (
            {"allowed_token_ids": [5, 257], "stop_token_ids": [5], "min_tokens": 3},
            "allowed_token_ids",
            "before 3 others",
        ),
        (
            {"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]},
            "allowed_token_ids",
            "allowed_token_ids and bad_words:",
        ),
        (
            {"allowed_token_ids": [97, 257], "bad_words": ["a"], "min_tokens": 1},
            "allowed_token_ids",
            "allowed_token_ids and bad_words and min_tokens",
        ),
        ({"stop_token_ids": EVERY, "min_tokens": 1}, "min_tokens", "^min_tokens .stop_token_ids"),
        (
            {
                "stop_token_ids": EVERY[1:97] + EVERY[98:],
                "allowed_token_ids": EVERY[1:],
                "bad_words": ["a"],
                "min_tokens": 1,
            },
            "allowed_token_ids",
            "no token is left that the answer could begin with",
        ),
    ],
)
def test_a_request_that_forbids_every_first_token(
    front: FrontEnd, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        start(front, max_tokens=5, **fields)
    assert caught.value.param == param and not len(front)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [257]},
        {"allowed_token_ids": [257], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [257, 5], "min_tokens": 1},
        {"allowed_token_ids": [97], "bad_words": ["ab"]},
        {"stop_token_ids": EVERY},
        {"stop_token_ids": EVERY[1:], "min_tokens": 1},
        {"allowed_token_ids": [97], "bad_words": ["a"], "max_tokens": 0},
    ],
)
def test_a_request_that_leaves_a_first_token_is_taken(front: FrontEnd, fields: dict[str, Any]) -> None:
    assert start(front, **fields)


def test_numbers_of_requests_begin_again_before_those_of_another_front_end() -> None:
    place = FrontPlace(number=1, count=2**28)  # four numbers, and four for the next process of the place
    front = FrontEnd(None, LIMITS, place=place)
    starts = [front.start(Prompt(token_ids=[1]), SamplingParams(n=n, max_tokens=1))[0] for n in (1, 2, 2, 1)]
    handles = [[completion.handle - place.first for completion in generation.completions] for generation in starts]
    assert handles == [[0], [1, 2], [0, 1], [2]]


BLENDING = FrontLimits(max_model_len=100, vocab_size=300, max_logprobs=5, chunking=Chunking(True, 0.15, (35, 36)))


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("ab#$cde#$f", ((0, 2), (4, 7), (9, 10))),
        ("#$ab#$#$", ((2, 4),)),
        ("ab#c$", ()),
        ("#", ()),
        ("###$#", ((0, 2), (4, 5))),
    ],
)
def test_parts_between_separators_are_chunks(text: str, chunks: tuple[tuple[int, int], ...]) -> None:
    front, params = FrontEnd(ByteTokenizer(), BLENDING), SamplingParams(max_tokens=1)
    (request,) = front.start(Prompt(token_ids=list(text.encode())), params)[1]
    assert request.reused == ReusedParts(chunks, 0.15)
    scored = front.start(Prompt(token_ids=list(text.encode())), params.clone(prompt_logprobs=0))[1][0]
    assert scored.reused.parts == (), "every row of the prompt is needed"


def test_blocks_behind_reused_texts_are_private_to_two_engines() -> None:
    """A prefill node says from which block on. A decode node reuses no texts, since the whole prompt comes to it."""
    sharing = SharePlan(sends=True, takes=True, place=("host", 1))
    front = FrontEnd(ByteTokenizer(), replace(BLENDING, sharing=sharing, block_size=2))
    asked = SamplingParams(max_tokens=1, kv_transfer_params={"do_remote_decode": True}, kv_chunks=[[5, 7]])
    generation, (request,) = front.start(Prompt(token_ids=list(b"ab#$cde")), asked)
    assert request.transfer is not None and request.reused.parts == ((5, 7),) and request.transfer.private == 2
    front.take(step({}, cached={0: 0}))
    front.take(step({0: 65}, Finish(handle=0, reason=FinishReason.LENGTH)))
    given = generation.output().kv_transfer_params
    (request,) = front.start(Prompt(token_ids=list(b"ab#$cde")), asked.clone(kv_transfer_params=given))[1]
    assert request.transfer is not None and request.reused.parts == () and request.transfer.private == 2
    (request,) = front.start(Prompt(token_ids=list(b"abcde")), asked.clone(kv_chunks=None))[1]
    assert request.transfer is not None and request.transfer.private == -1


@pytest.mark.parametrize(("homes", "port"), [({}, 5700), ({0: 0}, 5700), ({0: 2}, 5702)])
def test_a_prefill_node_names_the_replica_that_computed_the_prompt(homes: dict[int, int], port: int) -> None:
    share = SharePlan(sends=True, place=("host", 5700), replicas=3 if homes else 1)
    front = FrontEnd(ByteTokenizer(), replace(LIMITS, sharing=share, block_size=4))
    generation = start(front, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    front.take(step({}, cached={0: 0}, homes=homes))
    front.take(step({0: 65}, Finish(handle=0, reason=FinishReason.LENGTH)))
    transfer = generation.output().kv_transfer_params
    assert transfer is not None and transfer["do_remote_prefill"] is True
    assert (transfer["remote_host"], transfer["remote_port"]) == ("host", port)
    assert transfer["remote_engine_id"] == f"host:{port}"


@pytest.mark.parametrize("separator", [(1,), (1, 2), (1, 1, 2), (2, 1, 2), (0,), (55296, 1)])
def test_separators_are_found_from_the_left(separator: tuple[int, ...]) -> None:
    """As by a loop over the tokens."""
    draw = random.Random(1)
    for _ in range(200):
        ids = draw.choices([*separator, 3], k=draw.randrange(12))
        borders, at = [0], 0
        while at <= len(ids) - len(separator):
            hit = tuple(ids[at : at + len(separator)]) == separator
            borders += [at, at + len(separator)] * hit
            at += len(separator) if hit else 1
        pairs = zip(borders[::2], [*borders[1::2], len(ids)], strict=True)
        expected = tuple(pair for pair in pairs if pair[0] < pair[1]) if len(borders) > 1 else ()
        assert Chunking(True, 0.15, separator).between(ids) == expected


def test_marked_parts_come_before_separators_and_exclude_what_names_no_parts() -> None:
    front = FrontEnd(ByteTokenizer(), replace(BLENDING, sharing=SharePlan(sends=True, place=("host", 1))))
    prompt, params = Prompt(text="ab#$cde", token_ids=list(b"ab#$cde"), chunks=((0, 5),)), SamplingParams(max_tokens=1)
    assert front.start(prompt, params)[1][0].reused.parts == ((0, 5),)
    for fields, words in (({"kv_chunks": [[0, 2]]}, "counts tokens"),):
        with pytest.raises(InvalidParameter, match=words) as caught:
            front.start(prompt, params.clone(**fields))
        assert caught.value.param == ("kv_chunks" if "kv_chunks" in fields else "messages")


def test_chunks_of_a_request_come_before_separators() -> None:
    front, prompt = FrontEnd(ByteTokenizer(), BLENDING), Prompt(token_ids=list(b"ab#$cde"))
    params = SamplingParams(max_tokens=1, kv_chunks=[[0, 3], [3, 6]], blend_ratio=0.5)
    (request,) = front.start(prompt, params)[1]
    assert request.reused == ReusedParts(((0, 3), (3, 6)), 0.5)
    assert not front.start(prompt, SamplingParams(max_tokens=1, kv_chunks=[]))[1][0].reused.parts
    assert not front.start(prompt, params.clone(prompt_logprobs=0))[1][0].reused.parts, "it needs every row"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_chunks": [[0, 8]]}, "ends at token 8, and the prompt has 7 tokens"),
        ({"kv_chunks": [[0, 8]], "prompt_logprobs": 0}, "ends at token 8"),
        (
            {"kv_chunks": [[0, 3], [2, 5]]},
            "kv_chunks at 1 is [2, 5]: kv_chunks must be a list of pairs [first token, end]",
        ),
        ({"kv_chunks": [[0, 3], [2, 5]]}, "in ascending order, here with 3 <= first token < end."),
        ({"kv_chunks": [[3, 3]]}, "ascending"),
        ({"kv_chunks": 3}, "ascending"),
        ({"kv_chunks": [[True, 3]]}, "ascending"),
        ({"kv_chunks": [[1]]}, "ascending"),
        ({"blend_ratio": 1.5}, "a number in [0, 1]"),
    ],
)
def test_chunks_that_cannot_be_reused_are_refused(fields: dict[str, Any], why: str) -> None:
    front = FrontEnd(ByteTokenizer(), BLENDING)
    with pytest.raises(InvalidParameter, match=re.escape(why)):
        front.start(Prompt(token_ids=list(b"ab#$cde")), SamplingParams(max_tokens=1, **fields))


@pytest.mark.parametrize("fields", [{"kv_chunks": [[0, 3]]}, {"blend_ratio": 0.5}])
def test_an_engine_that_moves_no_kv_says_so(front: FrontEnd, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="--enable-cache-blend"):
        front.start(Prompt(token_ids=[72, 73, 74]), SamplingParams(max_tokens=1, **fields))


def test_kv_chunks_count_tokens_not_characters() -> None:
    with pytest.raises(InvalidParameter, match="send token ids"):
        FrontEnd(ByteTokenizer(), BLENDING).start(Prompt(text="abcdef"), SamplingParams(kv_chunks=[[0, 3]]))

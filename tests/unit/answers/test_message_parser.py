"""Answers in harmony's messages: recorded and written ones, damaged ones, and all of them however they are cut."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.answers.answer_events import CallArguments, CallBegins, Event, Thought, Words
from quire.answers.choice_parser import ChoiceParser, ParserPlan
from quire.contracts.output import CompletionOutput
from quire.contracts.sampling import SamplingParams
from quire.contracts.structured import StructuredOutputsParams
from quire.text.output_styles import OutputStyles
from quire.text.sequence import SequenceText
from quire.text.tool_formats import MESSAGE_FORMATS

from ...support.harmony_tokenizer import SPECIALS, HarmonyTokenizer

TOKENIZER = HarmonyTokenizer()
STYLES = OutputStyles(None, None, "", MESSAGE_FORMATS[0])
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
ENDERS = [TOKENIZER.token_id(token) for token in ("<|return|>", "<|call|>", "<|endoftext|>")]
AGAIN = "<|end|><|start|>assistant"


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def tail(prompt: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(prompt[prompt.rindex("<|start|>") :], False))


def pieces(ids: Sequence[int], edges: Sequence[int], params: SamplingParams, prompt: str, cut: bool) -> Any:
    """Outputs of the engine, as a front end makes them: the text of each is what the detokenizer gives."""
    text = SequenceText(TOKENIZER, TOKENIZER.encode(prompt, False), params)
    ender = not cut and bool(ids) and ids[-1] in ENDERS
    past = 0
    bounds = sorted({*(edge for edge in edges if 0 < edge < len(ids)), len(ids)})
    for edge in bounds:
        last = edge == len(ids)
        delta, stop = text.push(ids[past:edge], last, ended_by_token=last and ender)
        reason = "stop" if stop is not None else ("length" if cut else "stop") if last else None
        keep = max(text.num_tokens - past, 0) if stop is not None else edge - past
        yield CompletionOutput(index=0, text=delta, token_ids=list(ids[past : past + keep]), finish_reason=reason)
        past = edge
        if stop is not None:
            return


def parse(
    answer: str | Sequence[int],
    *tools: str,
    edges: Sequence[int] = (),
    prompt: str = PROMPT,
    cut: bool = False,
    parallel: bool = True,
    **params: Any,
) -> tuple[list[Event], int]:
    """The events of an answer, adjacent ones joined and ids left out, and the number of tokens of its reasoning."""
    ids = TOKENIZER.encode(answer, False) if isinstance(answer, str) else answer
    plan = ParserPlan(
        styles=STYLES, tools=tuple(map(function, tools)), opened=tail(prompt), parallel=parallel, thoughts=True
    )
    sampling = SamplingParams(**params)
    parser = ChoiceParser(plan, sampling, TOKENIZER)
    merged: list[Event] = []
    for piece in pieces(ids, edges, sampling, prompt, cut):
        for event in parser.events(piece):
            last = merged[-1] if merged else None
            if isinstance(event, CallBegins):
                merged.append(msgspec.structs.replace(event, call_id=""))
            elif isinstance(last, type(event)) and not isinstance(last, CallBegins):
                assert event.text
                merged[-1] = msgspec.structs.replace(last, text=last.text + event.text)
            else:
                assert event.text
                merged.append(event)
    return merged, parser.num_thought


def summary(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls) of events."""
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    words = "".join(event.text for event in events if isinstance(event, Words))
    names = [event.name for event in events if isinstance(event, CallBegins)]
    texts = [
        "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == at)
        for at in range(len(names))
    ]
    return thought, words, list(zip(names, texts, strict=True))


def told(answer: str | Sequence[int], *tools: str, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    return summary(parse(answer, *tools, **options)[0])


ARGUMENTS = '{"city": "Oslø"}'
CALL = ("weather", ARGUMENTS)
SHORT = {
    "[analysis]": "<|channel|>analysis<|message|>",
    "[comment]": "<|channel|>commentary<|message|>",
    "[final]": "<|channel|>final<|message|>",
    "[tool]": "<|channel|>commentary to=functions.weather",
    "[to]": " to=functions.weather",
    "[again]": AGAIN,
    "[city]": ARGUMENTS,
    **{f"[{token[2:-2]}]": token for token in SPECIALS},
}
# name, answer with words of SHORT -> reasoning, content, calls
TABLE: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("reasoning and content", "[analysis]a b[again][final]c\nd[return]", "a b", "c\nd", []),
    ("recipient behind the channel", "[tool] [constrain]json[message][city][call]", "", "", [CALL]),
    ("recipient before the channel", "[to][channel]commentary json[message][city][call]", "", "", [CALL]),
    ("recipient in a later header", "[analysis]a[again][to][comment][city][call]", "a", "", [CALL]),
    ("glued format", "[tool][constrain]json[message][city][call]", "", "", [CALL]),
    ("bare recipient", "[channel]commentary to=weather[message][city][call]", "", "", [CALL]),
    ("call in the analysis", "[channel]analysis[to] code[message][city][call]", "", "", [CALL]),
    ("glued channel", "[channel]commentaryto=functions.weather[message][city][call]", "", "", [CALL]),
    ("preamble", "[comment]I look.[again][tool][message][city][call]", "", "I look.", [CALL]),
    ("several of a kind", "[analysis]a[again][comment]b[again][analysis]c[again][final]d[return]", "a\nc", "b\nd", []),
    ("two calls", "[tool][message]{}[again][tool][message][city][call]", "", "", [("weather", "{}"), CALL]),
    ("empty call", "[tool][message][call]", "", "", [("weather", "{}")]),
    ("unknown function", "[channel]commentary to=functions.other[message]{}[call]", "", "{}", []),
    ("built-in tool", "[channel]analysis to=python[message]print(1)[call]", "", "", []),
    ("built-in tool with a function", "[channel]commentary to=browser.search json[message]{}[call]", "", "", []),
    ("to the user", "[channel]final to=user[message]a[return]", "", "a", []),
    ("arguments that are none", "[tool][message]Oslo[call]", "", "Oslo", []),
    ("text behind the arguments", "[tool][message]{} \n done[call]", "", "done", [("weather", "{}")]),
    ("unknown channel", "[channel]summary[message]a[return]", "", "a", []),
    ("no channel", "[message]a[return]", "", "a", []),
    ("no header", "Hello\nyou[return]", "", "Hello\nyou", []),
    ("no header in a line", "Hello you[return]", "", "Hello you", []),
    ("no header after a message", "[analysis]a[again]Hello[return]", "a", "Hello", []),
    ("no message token", "[channel]final Hello[return]", "", "Hello", []),
    ("no start token", "[analysis]a[end]assistant[final]b[return]", "a", "b", []),
    ("no end of a message", "[analysis]a[final]b[return]", "a", "b", []),
    ("no end before reasoning", "[final]a[analysis]b[return]", "b", "a", []),
    ("a fault in arguments", '[tool][message]{"a": tru x}[call]', "", "tru x}", [("weather", '{"a": ')]),
    ("message token twice", "[final]a[message]b[return]", "", "ab", []),
    ("format in a body", "[final]a[constrain]b[return]", "", "ab", []),
    ("two channels", "[channel]analysis[final]a[return]", "", "a", []),
    ("recipient, then another channel", "[channel]analysis[to][comment][city][call]", "", "", [CALL]),
    ("ends without messages", "[end][end][call][start][start]assistant[final]a[return]", "", "a", []),
    ("nothing", "[return]", "", "", []),
    ("a header alone", "[channel]analysis[return]", "", "", []),
    ("another role", "[final]a[end][start]user[message]b[return]", "", "a\nb", []),
]


def spelled_out(answer: str) -> str:
    for short, text in SHORT.items():
        answer = answer.replace(short, text)
    return answer


ANSWERS = [(name, spelled_out(answer), *rest) for name, answer, *rest in TABLE]
IDS = [name for name, *_ in ANSWERS]


@pytest.mark.parametrize(("answer", "thought", "words", "calls"), [case[1:] for case in ANSWERS], ids=IDS)
def test_an_answer(answer: str, thought: str, words: str, calls: list[tuple[str, str]]) -> None:
    assert told(answer, "weather") == (thought, words, calls)


@pytest.mark.parametrize("answer", [case[1] for case in ANSWERS], ids=IDS)
def test_an_answer_is_the_same_however_it_is_cut(answer: str) -> None:
    ids = TOKENIZER.encode(answer, False)
    for params in ({}, {"skip_special_tokens": False}, {"stop": ["you", '"']}):
        whole = parse(ids, "weather", **params)
        assert parse(ids, "weather", edges=range(len(ids)), **params) == whole
        for at in range(1, len(ids)):
            assert parse(ids, "weather", edges=[at], **params) == whole, (at, params)


def test_recorded_answers(shared: Path) -> None:
    lines = (shared / "hf" / "tool_outputs.jsonl").read_text("utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if case["family"] == "gpt_oss"]
    assert len(cases) == 7
    for case in cases:
        thought, words, calls = told(case["text"], *case["tools"], cut=case["kind"] == "truncated")
        expect = case["expect"]
        assert (thought or None, words or None) == (expect["reasoning"], expect["content"]), case["id"]
        assert [(name, json.loads(text)) for name, text in calls] == [
            (call["name"], call["arguments"]) for call in expect["tool_calls"]
        ], case["id"]


def test_only_special_tokens_are_structure() -> None:
    spelled = TOKENIZER.spelled("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert len(spelled) > 7
    ids = TOKENIZER.encode("<|channel|>analysis<|message|>", False) + spelled + TOKENIZER.encode("<|return|>", False)
    assert told(ids) == ("<|end|><|start|>assistant<|channel|>final<|message|>", "", [])


def test_reasoning_tokens_are_those_of_its_bodies() -> None:
    thought = "ab\nøé"
    answer = f"<|channel|>analysis<|message|>{thought}{AGAIN}<|channel|>final<|message|>c<|return|>"
    assert parse(answer)[1] == len(TOKENIZER.encode(thought, False))
    assert parse(answer, edges=range(100))[1] == len(TOKENIZER.encode(thought, False))


def test_reasoning_tokens_of_a_stop_string_count() -> None:
    answer = "<|channel|>analysis<|message|>abcSTOP"
    for edges in ([], range(60)):
        assert parse(answer, stop=["STOP"], edges=edges) == ([Thought("abc")], 7)


@pytest.mark.parametrize(
    ("answer", "told_", "calls"),
    [
        ('<|channel|>commentary to=functions.weather<|message|>{"city": "Os', ("", ""), [("weather", '{"city": "Os')]),
        ("<|channel|>commentary to=functions.weather<|message|>", ("", ""), []),
        ("<|channel|>commentary to=functions.weather<|message|>{", ("", ""), []),
        ("<|channel|>comm", ("", ""), []),
        (f"<|channel|>analysis<|message|>a{AGAIN}", ("a", ""), []),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", ("a", ""), []),
        (" to", ("", ""), []),
        (" to=functions.wea", ("", ""), []),
        ("Hello you", ("", "Hello you"), []),
    ],
)
def test_an_answer_that_a_limit_cuts(answer: str, told_: tuple[str, str], calls: list[tuple[str, str]]) -> None:
    assert told(answer, "weather", cut=True) == (*told_, calls)


def test_stop_strings_cut_what_is_shown() -> None:
    answer = f"<|channel|>analysis<|message|>a{AGAIN}<|channel|>final<|message|>one STOP two<|return|>"
    assert told(answer, stop=["STOP"]) == ("a", "one ", [])
    assert told(answer, stop=["STOP"], edges=range(60)) == ("a", "one ", [])
    # the text may begin a stop string, so it is held back, and the message's end behind it, too
    assert told(answer, stop=["STOP", "two!"], edges=range(60)) == ("a", "one ", [])


def test_special_tokens_that_are_shown_are_no_text_of_a_message() -> None:
    answer = f"<|channel|>analysis<|message|>a{AGAIN}<|channel|>final<|message|>b<|return|>"
    structured = StructuredOutputsParams(json_object=True)
    for params in ({"skip_special_tokens": False}, {"structured_outputs": structured}):
        assert told(answer, **params) == ("a", "b", [])
        assert told(answer, include_stop_str_in_output=True, **params) == ("a", "b", [])


def test_a_stop_string_may_begin_in_a_special_token() -> None:
    answer = f"<|channel|>analysis<|message|>a{AGAIN}<|channel|>final<|message|>b<|return|>"
    for stop in ("<|end|>!", "assistant<|channel|>final<|message|>!"):
        for edges in ([], range(60)):
            assert told(answer, skip_special_tokens=False, stop=[stop], edges=edges) == ("a", "b", [])
    assert told(answer, skip_special_tokens=False, stop=["nd|>"], edges=range(60)) == ("a", "", [])


def test_further_calls_are_left_out_where_one_is_allowed() -> None:
    call = f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}"
    assert told(f"{call}{AGAIN}{call}<|call|>", "weather", parallel=False) == ("", "", [CALL])


def test_without_tools_a_call_is_content() -> None:
    assert told(ANSWERS[1][1]) == ("", ARGUMENTS, [])


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("<|start|>assistant<|channel|>final<|message|>One", " two<|return|>", ("", " two", [])),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            f"a{AGAIN}<|channel|>final<|message|>b<|return|>",
            ("a", "b", []),
        ),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a<|return|>", ("a", "", [])),
        ("<|start|>assistant to=functions.weather<|channel|>commentary<|message|>", "{}<|call|>", ("", "{}", [])),
    ],
)
def test_the_prompt_may_have_begun_a_message(prompt: str, answer: str, expected: Any) -> None:
    assert told(answer, "weather", prompt=prompt) == expected
    assert told(answer, "weather", prompt=prompt, edges=range(99)) == expected


def test_a_prompt_without_messages_begins_a_header() -> None:
    plan = ParserPlan(styles=STYLES)
    parser = ChoiceParser(plan, SamplingParams(), TOKENIZER)
    ids = TOKENIZER.encode("<|channel|>final<|message|>a", False)
    assert parser.events(CompletionOutput(index=0, text="finala", token_ids=ids, finish_reason="stop")) == [Words("a")]


def test_a_long_header_is_text() -> None:
    text = "word " * 300
    assert told(text + "<|return|>") == ("", text, [])
    assert told(text + "<|return|>", edges=range(2000)) == ("", text, [])
    parser = ChoiceParser(ParserPlan(styles=STYLES), SamplingParams(), TOKENIZER)
    piece = CompletionOutput(index=0, text=text, token_ids=TOKENIZER.encode(text, False))
    assert parser.events(piece) == [Words(text)]  # before the end


FRAGMENTS = [
    *SPECIALS,
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.weather",
    " to=weather",
    " to=python",
    " to=",
    "json",
    " ",
    "\n",
    "a",
    "ø",
    "{",
    "}",
    '"',
    '{"a": 1}',
    '{"a',
    "\\",
    "user",
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=24),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_sequence_of_tokens_gives_the_same_events_however_it_is_cut(
    fragments: list[str], seed: int, cut: bool, visible: bool, stops: bool
) -> None:
    rng = Random(seed)
    ids = TOKENIZER.encode("".join(fragments), False)
    if ids and rng.random() < 0.3:  # bytes of unfinished characters
        ids.insert(rng.randrange(len(ids)), TOKENIZER.spelled("ø")[rng.randrange(2)])
    options: dict[str, Any] = {"cut": cut, "skip_special_tokens": not visible}
    if stops:
        options["stop"] = ["a a", "aa"]
    whole = parse(ids, "weather", **options)
    edges = sorted(rng.choices(range(len(ids) + 1), k=5))
    assert parse(ids, "weather", edges=edges, **options) == whole
    assert parse(ids, "weather", edges=range(len(ids)), **options) == whole
    _, _, calls = summary(whole[0])
    for name, arguments in calls:
        assert name == "weather" and arguments.startswith("{")

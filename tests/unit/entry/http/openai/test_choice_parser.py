"""Reasoning, content and calls in the answers of /v1/chat/completions: the same, however the model's text is cut.

The engine is scripted: a test writes the model's text. The template is the bundled one, which shows tools, writes calls
as <tool_call>{...}</tool_call> and opens <think> when enable_thinking is true.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.answers.answer_events import Words
from quire.answers.choice_parser import ChoiceParser, ParserPlan
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.entry.http.openai.chat import ChatEventWriter
from quire.entry.http.openai.generate import Job, StreamProgress, usage
from quire.entry.http.openai.schema import ChatRequest
from quire.entry.http.openai.tools import plan_parser, tool_use
from quire.entry.prompts import Prompt
from quire.text.load import TextSide

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": CITY}}
    for name in ("weather", "time")
]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslø"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER, TIME = {"name": "weather", "arguments": {"city": "Oslø"}}, {"name": "time", "arguments": {"city": "Rome"}}
Piece = tuple[str, list[int]]


@pytest.fixture(autouse=True)
def long_context(scripted: Any) -> None:
    scripted.ready = msgspec.structs.replace(scripted.ready, max_model_len=4096)
    scripted.text = replace(scripted.text, parsers=(None, "deepseek_r1"))


@pytest.fixture
def pieces_of(text_side: TextSide) -> Callable[..., list[Piece]]:
    """A text in pieces, cut at these places, each with the tokens that end in it."""

    def pieces(text: str, *places: int) -> list[Piece]:
        tokenizer = text_side.tokenizer
        assert tokenizer is not None
        left, found, done = tokenizer.encode(text, False), [], 0
        for begin, end in zip((0, *places), (*places, len(text)), strict=True):
            mine = []
            while left and done + len(tokenizer.token_bytes(left[0])) <= len(text[:end].encode()):
                done += len(tokenizer.token_bytes(left[0]))
                mine.append(left.pop(0))
            found.append((text[begin:end], mine))
        return found

    return pieces


@pytest.fixture
def generate_pieces(begin: Any, scripted: Any, make_client: Callable[..., Any]) -> Callable[..., Any]:
    """Ask, have the model say these pieces in all choices, and return the reply."""

    def call(pieces: list[Piece], finish: str = "stop", serve: Any = None, **fields: Any) -> Any:
        async def main() -> Any:
            task, reply, _, stream = await begin(
                make_client(scripted, **(serve or {})), PATH, {"messages": USER, **fields}
            )
            n = fields.get("n", 1)
            if not fields.get("stream"):
                pieces[:] = [("".join(text for text, _ in pieces), [i for _, ids in pieces for i in ids])]
            for at, (text, ids) in enumerate(pieces):
                reason = finish if at == len(pieces) - 1 else None
                outputs = [
                    CompletionOutput(index=i, text=text, token_ids=list(ids), finish_reason=reason) for i in range(n)
                ]
                prompt = scripted.prompts[-1][0].token_ids
                stream.put(
                    [
                        (
                            0,
                            RequestOutput(
                                request_id="r",
                                prompt=None,
                                prompt_token_ids=prompt,
                                outputs=outputs,
                                finished=reason is not None,
                            ),
                        )
                    ]
                )
                for _ in range(4):
                    await asyncio.sleep(0)
            stream.put(None)
            return await task

        reply = asyncio.run(main())
        assert reply.status == 200, reply.body
        return reply

    return call


def folded(events: list[Any], index: int = 0) -> dict[str, Any]:
    """Return the message that the chunks of a choice make, read as strictly as any client does."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    for choice in choices[1:]:
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"]) and call["type"] == "function"
                assert call["function"] == {"name": call["function"]["name"], "arguments": ""}
                message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    return message | {"finish_reason": choices[-1]["finish_reason"]}


def whole(choice: Any) -> dict[str, Any]:
    """The same of an answer in one piece."""
    message = choice["message"]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message["content"],
        "reasoning": message.get("reasoning", ""),
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn: ids; arguments as values."""
    ids = [call["id"] for call in message["calls"]]
    assert len(set(ids)) == len(ids) and all(ids)
    calls = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in message["calls"]]
    return message | {"calls": calls, "content": message["content"] or ""}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CALL, {"tools": TOOLS}, {"calls": [WEATHER], "finish_reason": "tool_calls"}),
    (
        "Let me see.\n" + CALL + "\n" + SECOND,
        {"tools": TOOLS},
        {"content": "Let me see.", "calls": [WEATHER, TIME], "finish_reason": "tool_calls"},
    ),
    (
        CALL + "\n" + SECOND,
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"calls": [WEATHER], "finish_reason": "tool_calls"},
    ),
    (
        "I muse.\n</think>\n\n" + CALL,
        {"tools": TOOLS, **THINK},
        {"reasoning": "I muse.", "calls": [WEATHER], "finish_reason": "tool_calls"},
    ),
    ("I muse 🙂.\n</think>\n\nHello, wörld", THINK, {"reasoning": "I muse 🙂.", "content": "Hello, wörld"}),
    ("I muse.\n</think>\n\nHello", {**THINK, "include_reasoning": False}, {"content": "Hello"}),
    ("<think>\nI muse.\n</think>\n\nHello", {}, {"reasoning": "I muse.", "content": "Hello"}),
    ("a < b, <tool", {"tools": TOOLS}, {"content": "a < b, <tool"}),
    ("Hello", {}, {"content": "Hello"}),
]
NOTHING = {"content": "", "reasoning": "", "calls": [], "finish_reason": "stop"}


@pytest.mark.parametrize(("text", "fields", "expected"), CASES, ids=[repr(c[0][:24]) for c in CASES])
def test_an_answer_is_the_same_however_it_is_cut(
    text_side: TextSide,
    pieces_of: Callable[..., list[Piece]],
    text: str,
    fields: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    request = msgspec.convert({"messages": USER, **fields}, ChatRequest)
    params = SamplingParams()
    prompt = Prompt(text="<think>\n" if THINK["chat_template_kwargs"] in fields.values() else "")
    plan = plan_parser(
        request,
        tool_use(request, hide_idle=False),
        params,
        replace(text_side, parsers=(None, "deepseek_r1")),
        prompt,
    )
    job = Job(
        prompts=[Prompt(token_ids=[5])],
        params=params,
        request_id="r",
        model="m",
        created=0,
        stream=True,
        parser_plan=plan,
        include_usage=True,
    )

    def output(piece: Piece, finish: str | None) -> RequestOutput:
        completion = CompletionOutput(index=0, text=piece[0], token_ids=piece[1], finish_reason=finish)
        return RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=[5], outputs=[completion], finished=finish is not None
        )

    (piece,) = pieces_of(text)
    counts = usage(1, len(piece[1]), 0)
    answer = json.loads(ChatEventWriter(job, request, text_side.tokenizer).whole([output(piece, "stop")], counts))
    assert plain(whole(answer["choices"][0])) == {**NOTHING, **expected}
    for places in [*((at,) for at in range(len(text) + 1)), tuple(range(1, len(text)))]:
        progress = StreamProgress(job, ChatEventWriter(job, request, text_side.tokenizer))
        pieces = pieces_of(text, *places)
        data = (
            b"".join(progress.events([(0, output(piece, "stop" if piece is pieces[-1] else None))]) for piece in pieces)
            + progress.last()
        )
        events = [json.loads(event[6:]) for event in data.decode().split("\n\n")[:-2]]
        assert plain(folded(events)) == {**NOTHING, **expected}, places
        assert events[-1]["usage"] == answer["usage"], places


@pytest.mark.parametrize(("text", "fields", "expected"), CASES, ids=[repr(c[0][:24]) for c in CASES])
def test_a_stream_is_the_answer(
    generate_pieces: Callable[..., Any],
    pieces_of: Callable[..., list[Piece]],
    text: str,
    fields: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    reply = generate_pieces(pieces_of(text), **fields).json
    assert plain(whole(reply["choices"][0])) == {**NOTHING, **expected}
    streamed = generate_pieces(
        pieces_of(text, *range(1, len(text))), **fields, stream=True, stream_options={"include_usage": True}
    )
    assert plain(folded(streamed.events)) == {**NOTHING, **expected}
    assert streamed.events[-1]["usage"] == reply["usage"]


def test_reasoning_tokens_are_counted(
    generate_pieces: Callable[..., Any], pieces_of: Callable[..., list[Piece]], text_side: TextSide
) -> None:
    assert text_side.tokenizer is not None
    thought, text = "I muse.\n", "I muse.\n</think>\n\nHello"
    usage = generate_pieces(pieces_of(text), **THINK).json["usage"]
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(text_side.tokenizer.encode(thought.strip(), False)) <= count <= usage["completion_tokens"] - 3
    hidden = generate_pieces(pieces_of(text), **THINK, include_reasoning=False).json
    assert hidden["usage"] == usage and "reasoning" not in hidden["choices"][0]["message"]
    unfinished = generate_pieces(pieces_of(thought), finish="length", **THINK).json
    assert unfinished["choices"][0]["finish_reason"] == "length"
    assert unfinished["usage"]["completion_tokens_details"]["reasoning_tokens"] >= count - 1
    assert generate_pieces(pieces_of("Hello")).json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    one, two = "<think>I muse.</think>Hello", "<think>I muse.</think>\n<think>I muse.</think>Hello"
    counts = [
        generate_pieces(pieces_of(said)).json["usage"]["completion_tokens_details"]["reasoning_tokens"]
        for said in (one, two)
    ]
    assert counts[1] == 2 * counts[0] > 0
    running = generate_pieces(
        pieces_of(text, 17, len(text) - 2), **THINK, stream=True, stream_options={"continuous_usage_stats": True}
    )
    counts = [e["usage"]["completion_tokens_details"]["reasoning_tokens"] for e in running.events if e.get("usage")]
    assert counts[0] == 0 and counts[-2:] == [count, count]


def test_only_calls_have_no_content(generate_pieces: Callable[..., Any], pieces_of: Callable[..., list[Piece]]) -> None:
    message = generate_pieces(pieces_of(CALL), tools=TOOLS).json["choices"][0]["message"]
    assert message["content"] is None and "reasoning" not in message
    message = generate_pieces(pieces_of("Hello")).json["choices"][0]["message"]
    assert message["content"] == "Hello" and set(message) == {"role", "content", "refusal"}


def test_how_it_ended(generate_pieces: Callable[..., Any], pieces_of: Callable[..., list[Piece]]) -> None:
    for choice, finish in (
        (None, "tool_calls"),
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
    ):
        fields = {"tools": TOOLS, "tool_choice": choice}
        assert generate_pieces(pieces_of(CALL), **fields).json["choices"][0]["finish_reason"] == finish
        assert folded(generate_pieces(pieces_of(CALL), **fields, stream=True).events)["finish_reason"] == finish
    assert generate_pieces(pieces_of(CALL), "length", tools=TOOLS).json["choices"][0]["finish_reason"] == "length"


def test_every_choice_is_read_by_itself(
    generate_pieces: Callable[..., Any], pieces_of: Callable[..., list[Piece]]
) -> None:
    fields = {"tools": TOOLS, "n": 3, **THINK}
    text = "I muse.\n</think>\n\n" + CALL
    answer = generate_pieces(pieces_of(text), **fields).json
    events = generate_pieces(pieces_of(text, 3, 20, 40), **fields, stream=True).events
    messages = [whole(choice) for choice in answer["choices"]]
    assert all(plain(message) == plain(messages[0]) for message in messages) and messages[0]["reasoning"]
    assert len({message["calls"][0]["id"] for message in messages}) == 3
    for index in range(3):
        assert plain(folded(events, index)) == plain(messages[0])


def test_tokens_are_told_with_calls(generate_pieces: Callable[..., Any], pieces_of: Callable[..., list[Piece]]) -> None:
    """Every token id shows once in a stream, also of tokens whose text is held back."""
    fields = {"tools": TOOLS, "return_token_ids": True}
    ids = generate_pieces(pieces_of(CALL), **fields).json["choices"][0]["token_ids"]
    events = generate_pieces(pieces_of(CALL, *range(1, len(CALL))), **fields, stream=True).events
    assert [i for e in events for c in e["choices"] for i in c.get("token_ids", ())] == ids


def test_calls_are_text_where_none_is_looked_for(
    generate_pieces: Callable[..., Any], pieces_of: Callable[..., list[Piece]]
) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message = generate_pieces(pieces_of(CALL), **fields).json["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message


# --- without a server -----------------------------------------------------------------------------------------------


def test_a_turn_without_styles_is_words() -> None:
    parser = ChoiceParser(ParserPlan(), SamplingParams(), None)
    piece = CompletionOutput(index=0, text="<think>a", token_ids=[1])
    assert parser.events(piece) == [Words("<think>a")] and parser.finish_reason(piece) is None
    last = CompletionOutput(index=0, text="", token_ids=[], finish_reason="stop")
    assert parser.events(last) == [] and parser.finish_reason(last) == "stop" and parser.num_thought == 0

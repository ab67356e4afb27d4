"""/v1/messages: what an answer is, whole and as a stream; and /v1/messages/count_tokens."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.contracts.errors import EngineClosed, QueueFull
from quire.entry.http.anthropic.schema import MessageAnswer
from quire.text.chat import ChatTemplate
from quire.text.load import TextSide

from .conftest import WEATHER, Api, events, gathered, without_ids

COUNT = "/v1/messages/count_tokens"
THOUGHT, WORDS = "<think>\nTwo towns, so two calls.\n</think>\n\n", "Let me look. "
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"town": "{town}"}}}}\n</tool_call>' for town in ("Kyōto", "Faro")
)


def cut(text: str, seed: int) -> list[str]:
    """A text in random pieces."""
    draw = random.Random(seed)
    ends = sorted(draw.sample(range(1, len(text)), draw.randrange(min(len(text) - 1, 40))))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_an_answer(api: Api) -> None:
    reply = api.told("Good day.")
    assert reply.status == 200 and reply.header("request-id") == reply.header("x-request-id")
    answer = reply.json
    assert msgspec.to_builtins(msgspec.convert(answer, MessageAnswer)) == answer
    assert answer["usage"]["input_tokens"] == len(api.engine.prompts[-1][0].token_ids) - 16
    assert answer | {"usage": 0} == {
        "id": f"msg_{reply.header('x-request-id')}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Good day."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": 0,
    }
    del answer["usage"]["input_tokens"]
    assert answer["usage"] == {
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": len(api.engine.text.tokenizer.encode("Good day.", False)),
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_thinking_text_and_calls_are_blocks(api: Api) -> None:
    answer = api.told(THOUGHT + WORDS + CALLS, tools=[WEATHER]).json
    thinking, text, first, second = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Two towns, so two calls.", "signature": ""}
    assert text["type"] == "text" and text["text"].strip() == WORDS.strip()
    assert [(call["type"], call["name"], call["input"]) for call in (first, second)] == [
        ("tool_use", "weather", {"town": "Kyōto"}),
        ("tool_use", "weather", {"town": "Faro"}),
    ]
    assert first["id"].startswith("toolu_") and first["id"] != second["id"] and "caller" not in first
    assert answer["stop_reason"] == "tool_use" and answer["stop_sequence"] is None
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < answer["usage"]["output_tokens"]


@pytest.mark.parametrize(
    "text",
    [THOUGHT + WORDS + CALLS, THOUGHT + WORDS, WORDS + CALLS, CALLS, WORDS, THOUGHT, ""],
    ids=["all", "no calls", "no thought", "calls", "words", "thought", "nothing"],
)
def test_a_stream_gathered_is_the_answer(api: Api, text: str) -> None:
    whole = api.told(text, tools=[WEATHER]).json
    for seed in range(8 if len(text) > 1 else 1):
        pieces = cut(text, seed) if text else [""]
        reply = api.told(*pieces, tools=[WEATHER], stream=True)
        assert without_ids(gathered(events(reply))) == without_ids(whole), pieces


def test_the_mock_engine_streams(mock_api: Api) -> None:
    whole, stream = mock_api.ask(max_tokens=12).json, events(mock_api.ask(max_tokens=12, stream=True))
    assert stream[0]["message"]["usage"]["output_tokens"] == 0
    for message in (whole, gathered(stream)):
        assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == 12
        assert [block["type"] for block in message["content"]] == ["text"]


# --- how it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "fields", "reason", "sequence"),
    [
        ({"stop_reason": "\n\n"}, {"stop_sequences": ["\n\n", "x"]}, "stop_sequence", "\n\n"),
        ({"stop_reason": 7}, {}, "end_turn", None),
        ({"finish": "length"}, {"max_tokens": 2}, "max_tokens", None),
        ({"finish": "length"}, {"max_tokens": 4096}, "model_context_window_exceeded", None),
    ],
)
def test_why_it_ended(api: Api, end: dict[str, Any], fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    for stream in (False, True):
        reply = api.told("Good", " day", **end, **fields, stream=stream)
        answer = gathered(events(reply)) if stream else reply.json
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_a_call_that_was_asked_for_is_tool_use_however_it_was_asked(api: Api) -> None:
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}, {"type": "auto"}):
        assert api.told(CALLS, tools=[WEATHER], tool_choice=choice).json["stop_reason"] == "tool_use", choice


def test_a_call_that_was_cut_off_has_no_input(api: Api) -> None:
    half = CALLS[: CALLS.index("yōto")]
    answer = api.told(half, finish="length", tools=[WEATHER]).json
    assert answer["content"][-1]["name"] == "weather" and answer["content"][-1]["input"] == {}
    assert answer["stop_reason"] == "model_context_window_exceeded"
    found = events(api.told(half, finish="length", tools=[WEATHER], stream=True))
    assert [event["type"] for event in found[-4:]] == [
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_an_answer_longer_than_the_context_is_asked_for_in_vain_and_not_refused(mock_api: Api) -> None:
    longest = mock_api.engine.ready.max_model_len
    mock_api.ask(max_tokens=longest * 10, stop_sequences=["e"])
    assert mock_api.engine.seen[-1][1].max_tokens == longest * 10  # the front end ends it with the context


def test_no_tokens_at_all(mock_api: Api) -> None:
    """A request without output, which warms the prefix cache with a prompt."""
    answer = mock_api.ask(max_tokens=0).json
    assert answer["content"] == [] and answer["usage"]["output_tokens"] == 0 and answer["stop_reason"] == "max_tokens"


# --- faults on the way ----------------------------------------------------------------------------------------------


def test_an_error_after_the_start_is_an_event(api: Api) -> None:
    reply = api.told("Good", " day", finish=None, error=EngineClosed("the server stops."), stream=True)
    *before, error = events(reply)
    assert [event["type"] for event in before] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
    ]
    assert error == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the server stops."},
        "request_id": reply.header("x-request-id"),
    }
    assert reply.complete


def test_a_full_queue_is_an_overload(api: Api) -> None:
    api.engine.refusal = QueueFull("the queue is full.")
    for stream in (False, True):
        reply = api.ask(stream=stream)
        assert reply.status == 529 and reply.header("retry-after") == "1"
        assert reply.json["error"] == {"type": "overloaded_error", "message": "the queue is full."}


# --- counting -------------------------------------------------------------------------------------------------------

TALK = [
    {"role": "user", "content": "Faro?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "ask", "signature": "s"},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}]},
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"messages": TALK, "tools": [WEATHER]},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "cache_control": {}},
    ],
    ids=str,
)
@pytest.mark.parametrize("hide", [False, True])
def test_tokens_are_counted_as_messages_are_rendered(
    make_api: Callable[..., Api], fields: dict[str, Any], hide: bool
) -> None:
    api = make_api(exclude_tools_when_tool_choice_none=hide)
    assert api.told("Yes.", **fields).status == 200
    counted = api.ask(COUNT, **fields)
    assert counted.status == 200 and counted.json == {"input_tokens": len(api.engine.prompts[-1][0].token_ids)}


def test_what_the_context_cannot_hold_is_counted_and_not_answered(make_api: Callable[..., Api]) -> None:
    api, long = make_api(longest=64), [{"role": "user", "content": "word " * 500}]
    assert api.ask(COUNT, messages=long).json["input_tokens"] > 400
    reply = api.ask(messages=long)
    assert reply.status == 400 and "this model's maximum context length is 64 tokens" in reply.json["error"]["message"]


# --- thinking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "thinks", "warnings"),
    [
        (None, True, 0),
        ({"type": "adaptive"}, True, 0),
        ({"type": "disabled"}, False, 0),
        ({"type": "enabled", "budget_tokens": 1024}, True, 0),
    ],
)
def test_thinking_is_the_templates_switch(api: Api, thinking: Any, thinks: bool, warnings: int) -> None:
    reply = api.told("Yes.", thinking=thinking)
    begun = "<think>" if "budget_tokens" in (thinking or ()) else ""  # else nobody would know what to count
    assert api.prompt.endswith("<|assistant|>" + begun) == thinks
    assert len(reply.all("x-quire-warning")) == warnings


def test_thinking_without_a_switch_is_told(make_api: Callable[..., Api], bundled_text: TextSide) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    reply = make_api(replace(bundled_text, chat_template=template)).told("Yes.", thinking={"type": "adaptive"})
    (warning,) = reply.all("x-quire-warning")
    assert "thinking.type adaptive is ignored" in warning


def test_thoughts_can_be_left_out(api: Api) -> None:
    answer = api.told(THOUGHT + WORDS, thinking={"type": "adaptive", "display": "omitted"}).json
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0

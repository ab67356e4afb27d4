"""Unknown fields of a request are told, at any depth; fields that clients send back as they came are not."""

import difflib
import json
from typing import Any

import pytest

from quire.entry.http.anthropic.messages import DECODER as MESSAGES
from quire.entry.http.openai.chat import DECODER as CHAT
from quire.entry.http.openai.responses import DECODER as RESPONSES
from quire.entry.http.openai.unknown import MAX_LOOKED, MAX_UNKNOWN, MOST_BYTES

SPECS: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"colour": 1}}}}
TEXT = {"type": "text", "text": "a"}


def told(decoder: Any, **fields: Any) -> list[str]:
    unknown: list[str] = decoder.decode(json.dumps(fields).encode())[1]
    return unknown


def user(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "a", **fields}


@pytest.mark.parametrize(
    ("decoder", "fields", "unknown"),
    [
        (
            CHAT,
            {"messages": [user(colour=1), user(colour=2, contents="b")]},
            ["'messages[].colour'", "'messages[].contents' (did you mean content?)"],
        ),
        (
            CHAT,
            {"messages": [user(content=[TEXT | {"txt": "b"}])]},
            ["'messages[].content[].txt' (did you mean text?)"],
        ),
        (
            CHAT,
            {
                "messages": [
                    user(),
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "1",
                                "type": "function",
                                "extra": 1,
                                "function": {"name": "f", "arguments": {"colour": 1}, "more": 1},
                            }
                        ],
                    },
                ]
            },
            ["'messages[].tool_calls[].extra'", "'messages[].tool_calls[].function.more'"],
        ),
        (
            CHAT,
            {"messages": [user()], "tools": [{"type": "function", "strict": True, "function": SPECS | {"x": 1}}]},
            ["'tools[].strict'", "'tools[].function.x'"],
        ),
        (
            CHAT,
            {"messages": [user()], "stream_options": {"include_usge": True}, "colour": 1},
            ["'colour'", "'stream_options.include_usge' (did you mean include_usage?)"],
        ),
        (
            RESPONSES,
            {"input": [user(content=[{"type": "input_text", "text": "a", "colour": 1}], colour=1)]},
            ["'input[].colour'", "'input[].content[].colour'"],
        ),
        (
            MESSAGES,
            {
                "model": "m",
                "max_tokens": 1,
                "system": [TEXT | {"a": 1}],
                "messages": [user(content=[{"type": "tool_result", "tool_use_id": "1", "content": [TEXT | {"b": 1}]}])],
                "tools": [{"name": "f", "input_examples": [{}]}],
            },
            ["'messages[].content[].content[].b'", "'system[].a'", "'tools[].input_examples'"],
        ),
    ],
)
def test_unknown_fields_are_told_by_where_they_stand(decoder: Any, fields: Any, unknown: list[str]) -> None:
    assert told(decoder, **fields) == unknown


@pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        (
            CHAT,
            {
                "messages": [
                    user(name="x", colour=None, tags=[]),
                    {
                        "role": "assistant",
                        "content": "b",
                        "refusal": None,
                        "annotations": [{"type": "url"}],
                        "audio": None,
                        "function_call": None,
                        "tool_calls": None,
                        "parsed": {"a": 1},
                    },
                ],
                "tools": [{"type": "function", "function": SPECS, "cache_control": {"type": "ephemeral"}}],
            },
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x", "status": "completed"},
                    {
                        "type": "message",
                        "id": "m",
                        "status": "completed",
                        "role": "assistant",
                        "phase": "final",
                        "content": [
                            {
                                "type": "output_text",
                                "text": "a",
                                "annotations": [{"a": 1}],
                                "logprobs": [{"token": "a"}],
                            }
                        ],
                    },
                ]
            },
        ),
        (
            MESSAGES,
            {
                "model": "m",
                "max_tokens": 1,
                "messages": [
                    user(
                        content=[
                            {"type": "thinking", "thinking": "a", "signature": "x"},
                            {"type": "redacted_thinking", "data": "x"},
                            TEXT | {"citations": [{"a": 1}], "cache_control": {"type": "ephemeral"}},
                            {
                                "type": "tool_use",
                                "id": "1",
                                "name": "f",
                                "input": {"a": 1},
                                "caller": {"type": "direct"},
                            },
                        ]
                    )
                ],
            },
        ),
    ],
)
def test_what_says_nothing_is_taken_silently(decoder: Any, fields: Any) -> None:
    assert told(decoder, **fields) == []


def test_only_so_many_are_told_and_looked_for() -> None:
    assert len(told(CHAT, messages=[user(**{f"field{i}": 1 for i in range(50)})])) == MAX_UNKNOWN
    assert told(CHAT, messages=[*[user()] * MAX_LOOKED, user(colour=1)]) == []
    parts = user(content=[TEXT] * (MAX_LOOKED // 10))
    assert told(CHAT, messages=[*[parts] * 9, user(colour=1)]) == ["'messages[].colour'"]
    assert told(CHAT, messages=[*[parts] * 10, user(colour=1)]) == []
    assert told(CHAT, messages=[user(**{"a\r\nb€" * 50: 1})])[0].isascii()


@pytest.mark.parametrize(("size", "unknown"), [(MOST_BYTES - 100, ["'messages[].colour'"]), (MOST_BYTES, [])])
def test_large_fields_are_not_decoded_again(size: int, unknown: list[str]) -> None:
    assert told(CHAT, messages=[user(colour=1, content="a" * size)]) == unknown


def test_what_is_near_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing a name with those that are known takes as long as reading hundreds of objects."""
    compared: list[str] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "colour": 1, "size": 2}
    turn = {"role": "assistant", "content": None, "tool_calls": [call] * 20, "colour": 1}
    told(CHAT, messages=[turn] * 20)
    assert compared == ["colour", "colour", "size"]


@pytest.mark.parametrize("value", [b"1e999", b"9" * 5000])
def test_what_nobody_reads_refuses_nothing(value: bytes) -> None:
    request, _ = CHAT.decode(b'{"messages": [{"role": "user", "content": "a", "x": ' + value + b"}]}")
    assert request.messages[0].content == "a"

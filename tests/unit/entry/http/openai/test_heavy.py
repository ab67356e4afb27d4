"""Requests that are small to send and heavy to read: their work leaves the event loop, or they are refused."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NOTHING_SAID = {"role": "user", "content": ""}


@pytest.fixture
def client(mock_engine: Any, make_client: Callable[..., Any]) -> Any:
    return make_client(mock_engine)


@pytest.fixture
def threads(text_side: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Threads that ran each function."""
    seen: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("encode", "encode_batch", "decode", "token_text"):
        watch(text_side.tokenizer, name)
    watch(text_side.chat_template, "render_here")
    monkeypatch.setattr("quire.entry.http.openai.prompts.msgspec", _Watched(seen))
    return seen


class _Watched:
    """msgspec, for `to_builtins`."""

    def __init__(self, seen: dict[str, set[int]]) -> None:
        self._seen = seen

    def to_builtins(self, value: Any) -> Any:
        import msgspec

        self._seen.setdefault("to_builtins", set()).add(threading.get_ident())
        return msgspec.to_builtins(value)


@pytest.mark.parametrize(
    "path, body, work",
    [
        (
            CHAT,
            {"messages": [NOTHING_SAID] * 1000, "truncate_prompt_tokens": 10, "max_tokens": 1},
            {"render_here", "encode", "to_builtins"},
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}], "max_tokens": 1},
            {"render_here", "encode", "to_builtins"},
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 1,
                "chat_template_kwargs": {"x": ["y"] * 5000},
            },
            {"render_here", "encode", "to_builtins"},
        ),
        (COMPLETIONS, {"prompt": ["word " * 100] * 100, "max_tokens": 1}, {"encode"}),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": 1, "bad_words": [f"word {i}" for i in range(1024)]},
            {"encode_batch"},
        ),
        ("/tokenize", {"messages": [NOTHING_SAID] * 1000}, {"render_here", "encode", "to_builtins"}),
        ("/tokenize", {"prompt": "a b " * 5000, "return_token_strs": True}, {"encode", "token_text"}),
        ("/detokenize", {"tokens": [300] * 5000}, {"decode"}),
    ],
)
def test_heavy_work_leaves_the_event_loop(
    client: Any, threads: dict[str, set[int]], path: str, body: dict[str, Any], work: set[str]
) -> None:
    assert asyncio.run(client.post(path, body)).status == 200
    assert {name for name, where in threads.items() if threading.get_ident() not in where} >= work


def test_token_strings_are_made_once_per_token(client: Any, text_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = text_side.tokenizer.token_text
    monkeypatch.setattr(text_side.tokenizer, "token_text", lambda token: (asked.append(token), original(token))[1])
    answer = asyncio.run(client.post("/tokenize", {"prompt": "a b " * 500, "return_token_strs": True})).json
    assert "".join(answer["token_strs"]) == "a b " * 500 and len(asked) == len(set(asked))


def test_bad_words_are_spelled_once_for_all_prompts(client: Any, text_side: Any, monkeypatch: Any) -> None:
    spelled: list[int] = []
    original = text_side.tokenizer.encode_batch
    monkeypatch.setattr(
        text_side.tokenizer,
        "encode_batch",
        lambda words, **kwargs: (spelled.append(len(words)), original(words, **kwargs))[1],
    )
    body = {"prompt": ["a"] * 20, "max_tokens": 1, "bad_words": ["once", "only"]}
    assert asyncio.run(client.post(COMPLETIONS, body)).status == 200
    assert spelled == [2, 2]


@pytest.mark.parametrize(
    "path, field, value, bound",
    [
        (CHAT, "messages", [NOTHING_SAID] * 10_001, "10000"),
        ("/tokenize", "messages", [NOTHING_SAID] * 10_001, "10000"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_001}], "10000"),
        (COMPLETIONS, "bad_words", ["w"] * 1_025, "1024"),
        (COMPLETIONS, "bad_words", ["w" * 257], "256"),
        (COMPLETIONS, "stop_token_ids", [5] * 1_025, "1024"),
        (COMPLETIONS, "allowed_token_ids", [5] * (2**18 + 1), "262144"),
        (COMPLETIONS, "logprob_token_ids", [5] * 129, "128"),
        (COMPLETIONS, "logit_bias", {str(i): 0.0 for i in range(1_025)}, "1024"),
        (CHAT, "logit_bias", {str(i): 0.0 for i in range(1_025)}, "1024"),
    ],
)
def test_lists_are_bounded(client: Any, path: str, field: str, value: Any, bound: str) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [NOTHING_SAID]} if path == CHAT else {}
    reply = asyncio.run(client.post(path, body | {field: value}))
    assert reply.status == 400 and reply.error["param"] == field
    assert field in reply.error["message"] and bound in reply.error["message"]


def test_what_every_completion_brings_along_is_bounded_together(client: Any) -> None:
    body = {"max_tokens": 1, "allowed_token_ids": [5, 6] * 5_000}
    for path, asked in (
        (COMPLETIONS, {"prompt": ["a"] * 30}),
        (COMPLETIONS, {"prompt": "a", "n": 30}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 30}),
    ):
        reply = asyncio.run(client.post(path, body | asked))
        assert reply.status == 400 and reply.error["param"] == "allowed_token_ids"
        assert "262144" in reply.error["message"]
    assert asyncio.run(client.post(COMPLETIONS, body | {"prompt": ["a"] * 20})).status == 200


def test_ten_thousand_unknown_fields_are_told_in_a_few_names(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "max_tokens": 1, **{f"f{i}": 1 for i in range(10_000)}}
    reply = asyncio.run(client.post(COMPLETIONS, body))
    assert reply.status == 200 and 0 < len(reply.all("x-quire-warning")) <= 10
    assert len([record for record in caplog.records if "unknown field" in record.message]) == 10


@pytest.mark.parametrize(
    "path, asked",
    [
        (COMPLETIONS, {"prompt": "a" * 500_000}),
        (COMPLETIONS, {"prompt": ["a", "a" * 500_000]}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 500_000}]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    client: Any, text_side: Any, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    encoded: list[int] = []
    original = text_side.tokenizer.encode
    monkeypatch.setattr(
        text_side.tokenizer,
        "encode",
        lambda text, *args, **kwargs: (encoded.append(len(text)), original(text, *args, **kwargs))[1],
    )
    reply = asyncio.run(client.post(path, asked | {"max_tokens": 1}))
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded" and max(encoded, default=0) < 500
    assert reply.error["param"] == ("messages" if path == CHAT else "prompt")
    cut = asyncio.run(client.post(path, asked | {"max_tokens": 1, "truncate_prompt_tokens": 5}))
    assert cut.status == 200 and max(encoded) >= 500_000

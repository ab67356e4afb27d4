"""/tokenize, /detokenize, /tokenizer_info and /v1/models: what evaluation harnesses and chat pages ask."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture
def client(scripted: Any, make_client: Callable[..., Any]) -> Any:
    return make_client(scripted)


def post(client: Any, path: str, **fields: Any) -> Any:
    return asyncio.run(client.post(path, fields))


def test_there_and_back(client: Any) -> None:
    tokens = post(client, "/tokenize", prompt="Hello, wörld", add_special_tokens=False, model="tiny").json
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 64 and tokens["token_strs"] is None
    assert post(client, "/detokenize", tokens=tokens["tokens"]).json == {"prompt": "Hello, wörld"}
    strings = post(client, "/tokenize", prompt="Hello world", return_token_strs=True).json["token_strs"]
    assert strings == ["Hello", " world"]


def test_the_body_of_a_chat_is_taken(client: Any) -> None:
    """Sampling fields are not in the prompt, and are told back."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    reply = post(client, "/tokenize", **chat, temperature=0.5, max_tokens=3, stream=True)
    assert reply.json["tokens"] == post(client, "/tokenize", **chat).json["tokens"]
    assert {f"unknown field '{name}'" for name in ("temperature", "max_tokens", "stream")} <= set(
        reply.all("x-quire-warning")
    )


def test_special_tokens_show_unless_skipped(client: Any) -> None:
    assert post(client, "/detokenize", tokens=[2]).json["prompt"] == "<|im_end|>"
    assert post(client, "/detokenize", tokens=[2], skip_special_tokens=True).json["prompt"] == ""


def test_huge_texts_are_encoded_one_after_the_other(
    client: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    together: list[int] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        running.append(len(text))
        together.append(sum(size == 20_000 for size in running))
        time.sleep(0.02)
        running.remove(len(text))
        return [5]

    monkeypatch.setattr("quire.entry.http.text_work.HUGE", 20_000)
    monkeypatch.setattr(scripted.text.tokenizer, "encode", encode)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(client.post("/tokenize", {"prompt": "a" * size}) for size in [20_000, 9_000] * 3))

    assert [reply.json["count"] for reply in asyncio.run(ask())] == [1] * 6
    assert len(together) == 6 and max(together) == 1


def test_a_conversation(client: Any) -> None:
    said = [{"role": "user", "content": "hi"}]
    with_prompt = post(client, "/tokenize", messages=said).json
    without = post(client, "/tokenize", messages=said, add_generation_prompt=False).json
    assert with_prompt["count"] > without["count"]
    assert "user" in post(client, "/detokenize", tokens=without["tokens"]).json["prompt"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": "5"}),
    ],
)
def test_bad_questions(client: Any, path: str, fields: dict[str, Any]) -> None:
    reply = post(client, path, **fields)
    assert reply.status == 400 and reply.error["param"]


def test_the_tokenizer(client: Any, text_side: Any) -> None:
    info = asyncio.run(client.get("/tokenizer_info")).json
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None and info["pad_token"] == "<|pad|>"
    assert info["chat_template"] == text_side.chat_template.source()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    for name in ("eos", "pad"):  # clients learn the ids by encoding the tokens
        ids = post(client, "/tokenize", prompt=info[f"{name}_token"], add_special_tokens=False).json["tokens"]
        assert ids == [info[f"{name}_token_id"]]


def test_without_a_tokenizer(scripted: Any, text_side: Any, client: Any) -> None:
    scripted.text = replace(text_side, tokenizer=None, chat_template=None)
    for path, fields in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert post(client, path, **fields).status == 400


def test_models(client: Any) -> None:
    cards = asyncio.run(client.get("/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["tiny", "alias"]
    assert asyncio.run(client.get("/v1/models/alias")).json == cards[1]
    assert cards[0]["max_model_len"] == 64 and cards[0]["owned_by"] == "quire"
    assert asyncio.run(client.get("/v1/models/")).status == 404  # nobody has asked for the main model
    missing = asyncio.run(client.get("/v1/models/org/name"))
    assert missing.status == 404 and "org/name" in missing.error["message"]

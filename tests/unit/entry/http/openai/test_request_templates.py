"""Chat templates that requests bring, and conversations that are too costly for the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.text.chat import ChatTemplate
from quire.text.sandbox import Sandbox

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
USER = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(seconds=1)
    yield box
    box.close()


@pytest.fixture
def client(mock_engine: Any, make_client: Callable[..., Any], sandbox: Sandbox) -> Any:
    mock_engine.text = replace(mock_engine.text, chat_template=ChatTemplate.load(bundled_model(), sandbox=sandbox))
    return make_client(mock_engine, trust_request_chat_template=True)


def test_without_the_flag_they_are_refused(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(mock_engine)
    for path in (CHAT, TOKENIZE):
        reply = asyncio.run(client.post(path, {"messages": USER, "chat_template": "x"}))
        assert reply.status == 400 and reply.error["param"] == "chat_template"
        assert "--trust-request-chat-template" in reply.error["message"]
        assert asyncio.run(client.post(path, {"messages": USER, "max_tokens": 1, "chat_template": None})).status == 200


def test_with_it_they_are_used(client: Any, mock_engine: Any) -> None:
    body = {"messages": USER, "max_tokens": 1, "chat_template": "{{ mood }} {{ messages[0].content }} {{ eos_token }}",
            "chat_template_kwargs": {"mood": "glad"}}
    assert asyncio.run(client.post(CHAT, body)).status == 200
    assert mock_engine.seen[-1][0][0].text == "glad hi <|im_end|>"
    asked = asyncio.run(client.post(TOKENIZE, body)).json["tokens"]
    assert asked == mock_engine.seen[-1][0][0].token_ids
    mock_engine.text = replace(mock_engine.text, chat_template=None)
    assert asyncio.run(client.post(CHAT, body)).status == 200


def test_a_hostile_one_keeps_nobody_waiting(client: Any) -> None:
    async def main() -> None:
        hostile = [asyncio.create_task(client.post(CHAT, {"messages": USER, "chat_template": LOOPS})) for _ in "123"]
        while not client_context(client).sandboxes.locked() and not any(task.done() for task in hostile):
            await asyncio.sleep(0)
        for _ in range(5):
            reply = await client.post(CHAT, {"messages": USER, "max_tokens": 1})
            assert reply.status == 200 and not any(task.done() for task in hostile)
        for reply in await asyncio.gather(*hostile):
            assert reply.status == 400 and reply.error["param"] == "chat_template"
            assert "more than 1 s" in reply.error["message"]

    asyncio.run(main())


def client_context(client: Any) -> Any:
    return client.app.routes[0].app._context


def test_who_waits_for_long_is_told_so(mock_engine: Any, make_client: Callable[..., Any], sandbox: Sandbox) -> None:
    mock_engine.text = replace(mock_engine.text, chat_template=ChatTemplate.load(bundled_model(), sandbox=sandbox))
    client = make_client(mock_engine, trust_request_chat_template=True, queue_timeout=0.01)

    async def main() -> None:
        async with client_context(client).sandbox(), client_context(client).sandbox():
            reply = await client.post(CHAT, {"messages": USER, "chat_template": "x"})
            assert reply.status == 408 and "simpler" in reply.error["message"] and reply.header("retry-after")

    asyncio.run(main())


def test_a_long_conversation_is_rendered_apart(client: Any, mock_engine: Any) -> None:
    body = {"messages": [*USER, {"role": "assistant", "content": "x"}] * 4000 + USER, "max_tokens": 1,
            "truncate_prompt_tokens": 20}
    reply = asyncio.run(client.post(CHAT, body))
    assert reply.status == 200 and reply.json["usage"]["prompt_tokens"] == 20

"""Chat templates that requests bring, and conversations that are too costly for the event loop."""

import asyncio
import json
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
        assert asyncio.run(client.post(path, {"messages": USER, "chat_template": None})).status == 200


def test_with_it_they_are_used(client: Any, mock_engine: Any) -> None:
    body = {
        "messages": USER,
        "chat_template": "{{ mood }} {{ messages[0].content }} {{ eos_token }}",
        "chat_template_kwargs": {"mood": "glad"},
    }
    assert asyncio.run(client.post(CHAT, body | {"max_tokens": 1})).status == 200
    assert mock_engine.seen[-1][0][0].text == "glad hi <|im_end|>"
    asked = asyncio.run(client.post(TOKENIZE, body)).json["tokens"]
    assert asked == mock_engine.seen[-1][0][0].token_ids
    mock_engine.text = replace(mock_engine.text, chat_template=None)
    assert asyncio.run(client.post(CHAT, body | {"max_tokens": 1})).status == 200


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


def test_a_client_that_is_gone_leaves_no_rendering_behind(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    box = Sandbox(seconds=600)
    mock_engine.text = replace(mock_engine.text, chat_template=ChatTemplate.load(bundled_model(), sandbox=box))
    client = make_client(mock_engine, trust_request_chat_template=True)
    hostile, gone = json.dumps({"messages": USER, "chat_template": LOOPS}).encode(), asyncio.Event()

    async def main() -> None:
        tasks = [asyncio.create_task(client.call("POST", CHAT, hostile, gone=gone)) for _ in range(6)]
        while len(box._children.busy) < 2:
            await asyncio.sleep(0.01)
        gone.set()
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [0] * 6
        reply = await client.post(CHAT, {"messages": USER, "max_tokens": 1, "chat_template": "x"})
        assert reply.status == 200
        while box._children.busy:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))
    box.close()


def test_in_the_background_nobody_is_told_before_it_is_known_to_render(client: Any) -> None:
    async def main() -> None:
        for source, words in (("{% if %}", "not valid Jinja"), (LOOPS, "more than 1 s")):
            engine = client_context(client).engine
            engine.text = replace(engine.text, chat_template=engine.text.chat_template.replaced(source))
            reply = await client.post("/v1/responses", {"input": "hi", "background": True})
            assert reply.status == 400 and words in reply.error["message"]

    asyncio.run(main())


def test_deep_arguments_of_past_calls_are_a_matter_of_the_request(client: Any) -> None:
    for depth in (900, 5000):
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
        talk = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
        assert asyncio.run(client.post(CHAT, {"messages": talk, "max_tokens": 1})).status in (200, 400)


def test_what_a_template_does_not_read_is_told(client: Any) -> None:
    def warnings(**fields: Any) -> list[str]:
        reply = asyncio.run(client.post(CHAT, {"messages": USER, "max_tokens": 1} | fields))
        assert reply.status == 200, reply.body
        return reply.all("x-quire-warning")

    assert warnings(chat_template_kwargs={"self": 1, "messages_": 2}) == [
        f"{name!r} is ignored: the chat template does not read it" for name in ("self", "messages_")
    ]
    assert warnings(documents=[{"text": "a"}]) == ["'documents' is ignored: the chat template does not read it"]
    source = "{{ mood }}{{ documents }}{{ self }}{{ given }}"
    variables = {"mood": 1, "self": 2, "given": 3}
    assert warnings(chat_template=source, chat_template_kwargs=variables, documents=[{"text": "a"}]) == []


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
    body = {
        "messages": [*USER, {"role": "assistant", "content": "x"}] * 4000 + USER,
        "max_tokens": 1,
        "truncate_prompt_tokens": 20,
    }
    reply = asyncio.run(client.post(CHAT, body))
    assert reply.status == 200 and reply.json["usage"]["prompt_tokens"] == 20

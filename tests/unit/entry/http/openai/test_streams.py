"""Streams: framing, order, merging, usage, comments, errors on the way, clients that go."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.contracts.errors import (
    EngineDead,
    EngineStarting,
    QueueFull,
    QueueTimeout,
    QuireError,
    RequestFailed,
)
from quire.entry.http.sse import EventStream

from .conftest import Reply, output

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    PLAIN: {"prompt": "Hello world", "max_tokens": 12, "seed": 5, "temperature": 1},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 5, "temperature": 1},
}
both = pytest.mark.parametrize("path", [PLAIN, CHAT])


def text_of(event: Any, index: int = 0) -> str:
    """Return the text that an event adds to a choice."""
    found = [c for c in event["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in found)


def joined(events: list[Any], index: int = 0) -> str:
    return "".join(text_of(e, index) for e in events)


def whole_text(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@both
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"stop": ["e"]}, {"max_tokens": 0}, {"stream_interval": 4}, {"logprobs": 1}], ids=str
)
def test_pieces_joined_are_the_answer(
    mock_engine: Any, make_client: Callable[..., Any], path: str, fields: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    client = make_client(mock_engine)
    body = BODIES[path] | fields
    answer = asyncio.run(client.post(path, body)).json
    reply = asyncio.run(client.post(path, body | {"stream": True}))
    assert reply.header("content-type").startswith("text/event-stream")
    assert reply.header("cache-control") == "no-cache" and reply.header("x-accel-buffering") == "no"
    for choice in answer["choices"]:
        index = choice["index"]
        assert joined(reply.events, index) == whole_text(choice)
        last = [c for e in reply.events for c in e["choices"] if c["index"] == index][-1]
        assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert all("usage" not in e and e["id"] == reply.events[0]["id"] for e in reply.events)
    if choice["logprobs"] is not None and path == PLAIN:
        for column, values in choice["logprobs"].items():
            pieces = [c["logprobs"][column] for e in reply.events for c in e["choices"] if c["logprobs"]]
            assert [v for piece in pieces for v in piece] == values


def test_order_of_a_chat(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    body = BODIES[CHAT] | {"stream": True, "stream_options": {"include_usage": True}}
    events = asyncio.run(make_client(mock_engine).post(CHAT, body)).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(e["choices"][0]["delta"]) == {"content"} for e in events[1:-2])
    assert events[-2]["choices"][0]["delta"] == {} and events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 12
    assert all(e["usage"] is None for e in events[:-1])
    assert all(e["object"] == "chat.completion.chunk" for e in events)


@both
def test_running_usage(mock_engine: Any, make_client: Callable[..., Any], path: str) -> None:
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = asyncio.run(make_client(mock_engine).post(path, body)).events
    counts = [e["usage"]["completion_tokens"] for e in events if e["usage"]]
    assert counts == sorted(counts) and counts[0] == (path == PLAIN) and counts[-1] == 12
    assert all(e["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] > 0 for e in events)


@both
def test_a_server_may_always_send_usage(mock_engine: Any, make_client: Callable[..., Any], path: str) -> None:
    client = make_client(mock_engine, enable_force_include_usage=True)
    assert asyncio.run(client.post(path, BODIES[path] | {"stream": True})).events[-1]["usage"]["total_tokens"] > 12


def test_echo_comes_first(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    client, body = make_client(mock_engine), BODIES[PLAIN] | {"echo": True, "logprobs": 1, "n": 2}
    choices = asyncio.run(client.post(PLAIN, body)).json["choices"]
    events = asyncio.run(client.post(PLAIN, body | {"stream": True})).events
    for choice in choices:
        mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert mine[0]["text"] == "Hello world" and "".join(c["text"] for c in mine) == choice["text"]
        for column, values in choice["logprobs"].items():
            assert [v for c in mine for v in c["logprobs"][column]] == values


@both
def test_ids_in_a_stream(mock_engine: Any, make_client: Callable[..., Any], path: str) -> None:
    client, body = make_client(mock_engine), BODIES[path] | {"return_token_ids": True, "prompt_logprobs": 0}
    answer = asyncio.run(client.post(path, body)).json
    events = asyncio.run(client.post(path, body | {"stream": True})).events
    ids = [i for e in events for c in e["choices"] for i in c.get("token_ids", ())]
    assert ids == answer["choices"][0]["token_ids"]
    holder = events[0]["choices"][0] if path == PLAIN else events[0]
    assert len(holder["prompt_token_ids"]) == answer["usage"]["prompt_tokens"] == len(holder["prompt_logprobs"])


# --- with outputs that the test writes ------------------------------------------------------------------------------


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return BODIES[path] | fields


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@both
def test_what_waits_goes_out_in_one_event_and_one_piece(
    begin: Any, scripted: Any, make_client: Any, output: Any, path: str
) -> None:
    async def main() -> Any:
        task, reply, _, stream = await begin(make_client(scripted), path, asked(path, stream=True))
        stream.put(output("a"))
        await settle()
        before = len(reply.parts)
        for text in ("b", "c", "d"):
            stream.put(output(text))
        await settle()
        assert len(reply.parts) == before + 1 and reply.parts[-1].count(b"data: ") == 1
        stream.put(output("e", finish="stop"))
        stream.put(None)
        return await task

    reply = asyncio.run(main())
    assert joined(reply.events) == "abcde" and [text_of(e) for e in reply.events if text_of(e)][1] == "bcd"


def test_a_finished_choice_is_not_told_again(begin: Any, scripted: Any, make_client: Any, output: Any) -> None:
    async def main() -> Any:
        task, _, _, stream = await begin(make_client(scripted), PLAIN, asked(PLAIN, stream=True, n=2))
        first = output("a", "b")
        first[0][1].outputs[0].finish_reason = "stop"
        stream.put(first)
        await settle()
        second = output("", "c")
        second[0][1].outputs[0].finish_reason, second[0][1].outputs[0].token_ids = "stop", []
        second[0][1].outputs[1].finish_reason = "length"
        stream.put(second)
        stream.put(None)
        return await task

    choices = [c for e in asyncio.run(main()).events for c in e["choices"]]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
        (0, "a", "stop"),
        (1, "b", None),
        (1, "c", "length"),
    ]


@both
def test_silence_brings_comments_and_they_begin_the_answer(
    begin: Any, scripted: Any, make_client: Any, output: Any, path: str
) -> None:
    async def main() -> Any:
        client = make_client(scripted, keep_alive_interval=0.01)
        task, reply, _, stream = await begin(client, path, asked(path, stream=True))
        assert reply.status == 0
        while len(reply.parts) < 2:
            await asyncio.sleep(0.005)
        assert reply.status == 200 and set(reply.parts) == {b": keep-alive\n\n"}
        stream.put(output("a", finish="stop"))
        stream.put(None)
        return await task

    assert joined(asyncio.run(main()).events) == "a"


FAILURES = [
    (QueueTimeout("waited 60 s"), 408, "queue_timeout"),
    (QueueFull("full"), 429, "engine_overloaded"),
    (RequestFailed("late", code="deadline"), 504, "deadline"),
    (RequestFailed("nan", code="nan_logits"), 500, "nan_logits"),
    (EngineDead("gone"), 503, "engine_dead"),
]


@both
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=[code for _, _, code in FAILURES])
def test_a_failure_before_the_first_token_has_its_status(
    begin: Any, scripted: Any, make_client: Any, path: str, stream: bool, error: QuireError, status: int, code: str
) -> None:
    async def main() -> Any:
        task, _, _, pipe = await begin(make_client(scripted), path, asked(path, stream=stream))
        pipe.put(error)
        reply = await task
        assert pipe.closed == 1
        return reply

    reply = asyncio.run(main())
    assert (reply.status, reply.error["code"]) == (status, code) and reply.complete
    assert (reply.header("retry-after") is not None) == (status in (408, 429, 503))
    assert (reply.header("x-should-retry") == "false") == (status == 500)


@both
def test_a_failure_after_the_first_token_is_an_event(
    begin: Any, scripted: Any, make_client: Any, output: Any, path: str
) -> None:
    async def main() -> Any:
        task, _, _, stream = await begin(make_client(scripted), path, asked(path, stream=True))
        stream.put(output("a"))
        await settle()
        stream.put(EngineDead("killed"))
        return await task

    reply = asyncio.run(main())
    assert reply.status == 200 and reply.complete and joined(reply.events[:-1]) == "a"
    assert reply.events[-1]["error"]["code"] == "engine_dead" and set(reply.events[-1]) == {"error"}


@both
def test_an_aborted_choice_is_no_answer(begin: Any, scripted: Any, make_client: Any, output: Any, path: str) -> None:
    async def main(stream: bool) -> Any:
        task, _, _, pipe = await begin(make_client(scripted), path, asked(path, stream=stream))
        pipe.put(output("a", finish="abort"))
        pipe.put(None)
        return await task

    assert asyncio.run(main(False)).status == asyncio.run(main(True)).status == 503


@both
@pytest.mark.parametrize("error", [QueueFull("full"), EngineStarting("soon"), RuntimeError("secret")], ids=str)
def test_what_cannot_be_opened(scripted: Any, make_client: Callable[..., Any], path: str, error: Exception) -> None:
    scripted.refusal = error
    reply = asyncio.run(make_client(scripted).post(path, BODIES[path] | {"stream": True}))
    assert reply.status in (429, 503, 500) and "secret" not in reply.error["message"]
    assert (reply.status == 500) == (reply.header("x-should-retry") == "false")


def test_nothing_is_there_while_it_loads(scripted: Any, make_client: Callable[..., Any]) -> None:
    scripted.ready = None
    reply = asyncio.run(make_client(scripted).post(PLAIN, BODIES[PLAIN]))
    assert reply.status == 503 and reply.error["code"] == "engine_starting" and reply.header("retry-after")
    scripted.text = None
    assert asyncio.run(make_client(scripted).post(CHAT, BODIES[CHAT])).status == 503


# --- clients that go ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queue", "decode"])
def test_a_client_that_goes_ends_its_request(
    begin: Any, scripted: Any, make_client: Any, output: Any, path: str, stream: bool, when: str
) -> None:
    async def main() -> None:
        client = make_client(scripted)
        task, reply, gone, pipe = await begin(client, path, asked(path, stream=stream))
        if when == "decode":
            pipe.put(output("a"))
            await settle()
        gone.set()
        await asyncio.wait_for(task, 5)
        assert pipe.closed == 1 and not reply.complete
        assert len(asyncio.all_tasks()) == 1
        again, *_, pipe = await begin(client, path, asked(path, stream=stream))  # the id is free, the routes work
        pipe.put(output("a", finish="stop"))
        pipe.put(None)
        assert (await again).status == 200

    asyncio.run(main())


@both
@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_while_a_long_text_is_encoded_never_reaches_the_engine(
    scripted: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    encoding, go_on, text = threading.Event(), threading.Event(), "word " * 4000

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        encoding.set()
        assert go_on.wait(30)
        return [5]

    async def main() -> None:
        monkeypatch.setattr(scripted.text.tokenizer, "encode", encode)
        monkeypatch.setattr(scripted.text.tokenizer, "fewest_tokens", lambda text: 1)
        gone, reply = asyncio.Event(), Reply()
        fields = {"prompt": text} if path == PLAIN else {"messages": [{"role": "user", "content": text}]}
        body = json.dumps(asked(path, stream=stream) | fields).encode()
        headers = {"x-request-id": "one"}
        client = make_client(scripted)
        task = asyncio.create_task(client.call("POST", path, body, headers=headers, gone=gone, reply=reply))
        assert await asyncio.to_thread(encoding.wait, 30) and not scripted.streams
        gone.set()
        await settle()
        go_on.set()
        await asyncio.wait_for(task, 5)
        assert not scripted.streams and not reply.status and len(asyncio.all_tasks()) == 1
        again = asyncio.create_task(client.call("POST", path, body, headers=headers))  # the id is free
        while not scripted.streams:
            await asyncio.sleep(0)
            assert not again.done()
        scripted.streams[0].put(output("a", finish="stop"))
        scripted.streams[0].put(None)
        assert (await again).status == 200

    asyncio.run(main())


@both
def test_a_cancelled_task_ends_its_request(begin: Any, scripted: Any, make_client: Any, path: str) -> None:
    async def main() -> None:
        task, _, _, pipe = await begin(make_client(scripted), path, asked(path, stream=True))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pipe.closed == 1 and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_client_that_goes_with_the_last_token_harms_nobody(
    begin: Any, scripted: Any, make_client: Any, output: Any
) -> None:
    async def main() -> None:
        for stream in (False, True):
            for steps in range(4):
                task, _, gone, pipe = await begin(make_client(scripted), PLAIN, asked(PLAIN, stream=stream))
                pipe.put(output("a", finish="stop"))
                pipe.put(None)
                for _ in range(steps):
                    await asyncio.sleep(0)
                gone.set()
                await asyncio.wait_for(task, 5)
                assert pipe.closed == 1 and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_requests_that_go_leave_nothing_in_the_core(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    async def main() -> None:
        client, free = make_client(mock_engine), mock_engine.core
        gone = [asyncio.Event() for _ in range(12)]
        body = b'{"prompt": "Hello", "max_tokens": 2000, "ignore_eos": true, "n": 2, "stream": true}'
        tasks = [asyncio.create_task(client.call("POST", PLAIN, body, gone=g)) for g in gone]
        for i, g in enumerate(gone):
            for _ in range(i * 3):
                await asyncio.sleep(0)
            g.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert len(mock_engine.front) == 0
        while free.has_work:
            await asyncio.sleep(0)

    asyncio.run(main())


# --- past the layers of the application -------------------------------------------------------------------------------


class Direct:
    """A body that a test opens and closes; keeps what is written."""

    def __init__(self) -> None:
        self.ready = False
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        assert self.ready
        self.parts.append(data)


def test_events_are_pushed_when_nothing_else_is_being_sent() -> None:
    async def main() -> None:
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"start"))

        direct = Direct()
        events = EventStream(send, [], 0.02, direct)
        assert not events.ready
        await events.write(b"a")
        direct.ready = True
        assert events.ready
        events.push(b"b")
        while b": keep-alive\n\n" not in sent:
            await asyncio.sleep(0.005)
        assert not events.ready  # a comment is under way
        await events.write(b"c")
        assert events.ready
        await events.end(b"d")
        assert sent == [b"start", b"a", b": keep-alive\n\n", b"c", b"d"] and direct.parts == [b"b"]
        assert not EventStream(send, [], 0.0).ready  # a server that offers nothing

    asyncio.run(main())

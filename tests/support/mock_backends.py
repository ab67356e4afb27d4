"""Backends of a router in this process: ASGI applications with a prefix cache, faults, and KV events in vLLM's form."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from quire.config.serve import HttpConfig, TracingConfig
from quire.entry.http.listener import HttpListener
from quire.entry.http.sockets import listen
from quire.router.app import NO_TRACING, RouterApp
from quire.router.settings import router_config

BLOCK = 16  # tokens of a KV block; a token is a byte of the prompt's text


class MockBackend:
    """A server whose answers are known: event i of a completion holds `{"i": i}`. `begun`: ids of requests whose answer
    has begun.

    first_s, event_s   seconds to the first event, and between events
    refuse             status of every completion instead of an answer; 0: none
    stalls             True: completions whose field `user` begins with "stall" get no answer
    """

    def __init__(self, name: str, *, num_blocks: int = 10_000) -> None:
        self.name = name
        self.url = ""
        self.first_s = self.event_s = 0.0
        self.refuse = 0
        self.stalls = False
        self.health, self.told = 200, b""  # status and body of the answers to health checks
        self.replaced_by: Any = None  # an ASGI application that answers everything instead
        self.num_blocks = num_blocks
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.prompt_tokens = self.cached_tokens = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.begun: set[str] = set()
        self.step: asyncio.Semaphore | None = None  # if set, each event waits for one release
        self.cut_after = -1  # events after which the connection breaks off; -1: never
        self.left = 0  # clients that closed the connection before the end
        self.live = 0
        self._listener: HttpListener | None = None

    async def start(self, port: int = 0) -> None:
        """Listen on a port of its own."""
        listening = listen(HttpConfig(port=port))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._listener = HttpListener(self, HttpConfig(), listening, lambda status: None)
        self._listener.start()
        while not self._listener._server.started:
            await asyncio.sleep(0)

    async def kill(self) -> None:
        """End as a killed process does: every connection is reset, and no further one is taken."""
        if self._listener is not None:
            self.cut()
            listener, self._listener = self._listener, None
            for server in listener._server.servers:
                server.close()
            await listener.stop(0.0)

    def cut(self) -> None:
        """Reset every connection."""
        assert self._listener is not None
        for connection in list(self._listener._server.server_state.connections):
            connection.transport.abort()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        path = scope["path"]
        if self.replaced_by is not None:
            return await self.replaced_by(scope, receive, send)
        if path == "/health":
            return await _answer(send, self.health, self.told)
        if path == "/metrics":
            return await _answer(send, 404, b"")
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(data or b"{}")
        if path == "/tokenize":
            return await _answer(send, 200, json.dumps({"tokens": list(_text(body).encode())}).encode())
        self.bodies.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if self.refuse:
            return await _answer(send, self.refuse, b'{"error": {"message": "full"}}')
        self._cache(body)
        self.live += 1
        try:
            await self._complete(body, receive, send)
        finally:
            self.live -= 1

    async def _complete(self, body: dict[str, Any], receive: Any, send: Any) -> None:
        gone = asyncio.create_task(receive())
        await asyncio.wait({gone}, timeout=self.first_s)
        if self.stalls and str(body.get("user")).startswith("stall"):
            await gone
            self.left += 1
            return None
        params = body.get("kv_transfer_params") or {}
        if not body.get("stream"):
            found: dict[str, Any] = {"choices": [{"text": "x"}], "by": self.name}
            if params.get("do_remote_decode"):
                found["kv_transfer_params"] = {"do_remote_prefill": True, "remote_engine_id": self.name}
            gone.cancel()
            return await _answer(send, 200, json.dumps(found).encode())
        self.begun.add(str(body.get("user")))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(body.get("max_tokens", 4)):
            if self.step is not None:
                await self.step.acquire()
            if number == self.cut_after:
                raise ConnectionAbortedError
            event = json.dumps({"i": number, "by": self.name}).encode()
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
            await asyncio.wait({gone}, timeout=self.event_s)
            if gone.done():
                self.left += 1
                return None
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        gone.cancel()
        return None

    def _cache(self, body: dict[str, Any]) -> None:
        data, key, hit = _text(body).encode(), 0, True
        self.prompt_tokens += len(data)
        for at in range(0, len(data) - BLOCK + 1, BLOCK):
            key = hash((key, data[at : at + BLOCK]))
            hit = hit and key in self.cache
            self.cached_tokens += BLOCK * hit
            self.cache[key] = self.cache.pop(key, None)
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)


def _text(body: dict[str, Any]) -> str:
    """The text of a prompt, as a template would make it."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return bytes(prompt).decode("latin-1")
    return prompt if prompt is not None else "".join(f"<{m['role']}>{m['content']}" for m in body.get("messages", ()))


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def mock_backends(count: int, **settings: Any) -> AsyncIterator[list[MockBackend]]:
    """`count` backends for the time of a `with`."""
    backends = [MockBackend(f"b{number}", **settings) for number in range(count)]
    async with AsyncExitStack() as stack:
        for backend in backends:
            await backend.start()
            stack.push_async_callback(backend.kill)
        yield backends


@asynccontextmanager
async def routed(
    backends: list[MockBackend],
    prefills: tuple[MockBackend, ...] = (),
    *,
    around: Callable[[Any], Any] = lambda router: router,
    tracing: TracingConfig = NO_TRACING,
    **settings: Any,
) -> AsyncIterator[tuple[RouterApp, str]]:
    """A router in front of backends, and its URL, for the time of a `with`. around: puts an application before it;
    tracing: its collector of spans"""
    urls = {"backend": [b.url for b in backends], "prefill_backend": [b.url for b in prefills]}
    patient = {"health_interval": 0.05, "connect_timeout": 30.0}
    router = RouterApp(router_config(urls | patient | {"policy": "round-robin"} | settings), tracing=tracing)
    listening = listen(HttpConfig(port=0))
    listener = HttpListener(around(router.traced), HttpConfig(), listening, router.refused)
    await router.start()
    listener.start()
    try:
        yield router, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await listener.stop(0.5)
        await router.close()


async def operate(router: RouterApp, path: str, body: object = None) -> Any:
    """Send a request of an operator, a GET without a body. Return the JSON of the answer."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    method = "GET" if body is None else "POST"
    await router.operate({"type": "http", "method": method, "path": path}, receive, send)
    assert sent[0]["status"] == 200
    return json.loads(sent[1]["body"])


def kv_batch(*events: Any, as_map: bool = False) -> bytes:
    """A batch of KV events as msgpack, in one of vLLM's two forms."""
    return msgspec.msgpack.encode({"ts": 1.0, "events": events} if as_map else [1.0, events, 0])

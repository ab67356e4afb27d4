"""A listener over any ASGI application, on a free port, in a thread of its own, with raw sockets to talk to it; and an
engine that is only what a test says it is."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from quire.config.engine import EngineConfig
from quire.config.serve import HttpConfig, ServerConfig
from quire.contracts.adapters import Adapter
from quire.entry.http.life.state import EngineState
from quire.entry.http.lora.served import ServedAdapters
from quire.entry.http.protocol import ConnectionLimits, LimitedProtocol, Traffic
from quire.procs.front_ends import ALONE
from quire.procs.messages import Loading, Ready


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        size, more = size + len(message["body"]), message["more_body"]
    body = f"{scope['method']} {scope['path']} {size}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Live:
    """A running listener: where it is, what it refused, and the counters that its connections share."""

    port: int
    traffic: Traffic
    refused: list[int] = field(default_factory=list)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def ask(self, *pieces: bytes) -> bytes:
        """Send the pieces and read until the server closes."""
        with self.connect() as peer:
            for piece in pieces:
                try:
                    peer.sendall(piece)
                except OSError:
                    break  # refused already; the answer is there to be read
            return read_all(peer)


def read_all(peer: socket.socket) -> bytes:
    """Until the end of the connection, however it ends."""
    received = b""
    try:
        while data := peer.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def read_until(peer: socket.socket, ending: bytes) -> bytes:
    """Return the bytes that arrive, up to `ending`."""
    received = b""
    while not received.endswith(ending):
        data = peer.recv(65536)
        assert data, received
        received += data
    return received


@contextmanager
def listening(app: Any, limits: ConnectionLimits) -> Iterator[Live]:
    listener = socket.create_server(("127.0.0.1", 0))
    refused: list[int] = []
    traffic = Traffic(refused.append)

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    def protocol(**kwargs: Any) -> LimitedProtocol:
        return LimitedProtocol(limits=limits, traffic=traffic, **kwargs)

    server = Server(
        uvicorn.Config(
            app,
            http=protocol,
            loop="none",
            ws="none",
            lifespan="off",  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            workers=1,
            timeout_graceful_shutdown=1,
        )
    )
    started = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield Live(listener.getsockname()[1], traffic, refused)
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture
def serve_echo() -> Iterator[Callable[..., Live]]:
    """Start listeners over `echo` (or another app) with some limits changed."""
    with ExitStack() as stack:

        def start(app: Any = echo, **changes: Any) -> Live:
            return stack.enter_context(listening(app, ConnectionLimits.of(HttpConfig(), **changes)))

        yield start


async def unchecked(adapter: Adapter) -> str:
    """Take any adapter."""
    return ""


@dataclass
class FakeEngine:
    """An engine for routes and the gate, each value as a test sets it."""

    state: EngineState = EngineState.READY
    config, place = EngineConfig(), ALONE
    ready: Ready | None = None
    text: Any = None
    failure: Exception | None = None
    loading: Loading = Loading("starting")
    loss: str = ""
    num_live: int = 0
    last_step_age: float | None = None
    adapters: ServedAdapters = field(default_factory=lambda: ServedAdapters(ServerConfig(), unchecked))

    def requests(self, tenant: str = "") -> list[dict[str, object]]:
        return [{"request_id": "r", "prefix": None}]


@dataclass
class Answer:
    """Answer of an application."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error of the body, which must have all four keys and nothing else, or be in Anthropic's form."""
        body = json.loads(self.body)
        error: dict[str, Any] = body["error"]
        if "type" in body:
            assert body == {"type": "error", "error": error, "request_id": self.headers["request-id"]}
            assert set(error) == {"type", "message"}
            return error | {"code": "of Anthropic's"}
        assert set(error) == {"message", "type", "param", "code"}, error
        return error

    def json(self) -> Any:
        return json.loads(self.body)


def call(app: Any, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """Send one request through an application; a keyword x_request_id="a" is the header x-request-id: a."""
    sent: list[Any] = []
    path, _, query = path.partition("?")
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    raw += [(b"content-length", b"%d" % len(body))] if body else []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": raw,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    start, pieces = sent[0], sent[1:]
    return Answer(
        start["status"],
        {name.decode(): value.decode() for name, value in start["headers"]},
        b"".join(piece.get("body", b"") for piece in pieces),
    )


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that is ready and idle."""
    plans = {"attention": "cpu (the only one)"}
    return FakeEngine(
        ready=Ready(
            max_model_len=64,
            vocab_size=256,
            num_slots=2,
            num_blocks=8,
            block_size=16,
            depth=1,
            dtype="float32",
            device="cpu",
            weight_bytes=1,
            kv_bytes=1,
            plans=plans,
        )
    )

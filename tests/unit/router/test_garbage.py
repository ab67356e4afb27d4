"""Requests leave nothing that waits for a garbage collection: the router would grow between two of them."""

import asyncio
import gc
import json
import time
from collections import Counter

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire.entry.http import protocol
from quire.router.upstream import Upstream

from ...support.mock_backends import mock_backends, routed

BODY = json.dumps({"prompt": "Once", "stream": True, "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
ROUNDS = 20
MADE = (protocol.ChunkedBody, protocol.LimitedProtocol, RequestResponseCycle, Upstream)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (HEAD + BODY, b"HTTP/1.1 200 "),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", b"HTTP/1.1 431 "),
    ],
    ids=["an answer", "a refusal"],
)
def test_closed_connections_leave_no_objects(monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes) -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend], health_interval=60.0) as (router, url):
            for _ in range(ROUNDS):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(sent)
                assert (await reader.read()).startswith(answer)
                router.backends[0].pool.close()  # the connection to the backend ends, too
                writer.close()
            until = time.monotonic() + 2.0  # the last connections are being closed
            while max((left := alive()).values(), default=0) > ROUNDS / 2 and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert max(left.values(), default=0) <= ROUNDS / 2, left

    monkeypatch.setattr(protocol, "LINGER", 0.0)
    gc.collect()
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        gc.enable()


def test_connections_of_a_listener_and_of_a_backend_share_a_buffer() -> None:
    """Buffers of asyncio, one of 256 KiB for each read, tear the heap: it grew by 500 bytes with each request."""

    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url):
            port, pool = int(url.rpartition(":")[2]), router.backends[0].pool
            clients = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(2)))
            asked = await asyncio.gather(*(pool.ask(b"GET", b"/health", [], b"") for _ in range(2)))
            made = [one for one in gc.get_objects() if isinstance(one, (protocol.LimitedProtocol, Upstream))]
            assert len(made) > len(clients) + len(asked) and len({id(one.get_buffer(-1).obj) for one in made}) == 3

    gc.collect()
    asyncio.run(asyncio.wait_for(work(), 60))


def alive() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in MADE)

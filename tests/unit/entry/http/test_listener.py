"""A listening socket that several processes share: each takes one connection per turn, and the queue stays long."""

import asyncio
import socket
from contextlib import ExitStack

import pytest

from quire.config.serve import HttpConfig
from quire.entry.http.listener import HttpListener

COUNT = 40


async def never(scope: object, receive: object, send: object) -> None: ...


@pytest.mark.parametrize("shared", [False, True])
def test_connections_that_come_at_once(shared: bool) -> None:
    async def work() -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            listener = HttpListener(never, HttpConfig(), listening, print, shared=shared)
            listener.start()
            while not listener._server.started:
                await asyncio.sleep(0)
            for _ in range(COUNT):  # nobody accepts meanwhile: all find a place in the queue
                stack.enter_context(socket.create_connection(listening.getsockname(), timeout=10))
            accepted = [0]
            while accepted[-1] < COUNT:
                await asyncio.sleep(0)
                accepted.append(len(listener._server.server_state.connections))
            await listener.stop(0.0)
            return [after - before for before, after in zip(accepted, accepted[1:], strict=False)]

    most = max(asyncio.run(asyncio.wait_for(work(), 60)))
    assert most <= 2 if shared else most > 2  # an accept per turn; Python 3.12 makes one more

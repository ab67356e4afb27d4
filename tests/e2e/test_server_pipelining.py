"""Clients that do not wait for an answer before they send more, and then leave: nothing goes on for them."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from ..support.full import full_rows
from .serving import MOCK, Server, running_server, wait_until

NUM_CLIENTS = 20
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*MOCK, "--mock-step-ms", "20") as server:  # 80 s for a whole answer
        yield server


def request(**fields: object) -> bytes:
    body = json.dumps({"prompt": "hi", "max_tokens": 4000, "ignore_eos": True} | fields).encode()
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    )
    return b"\r\n".join((*lines, b"", body))


def running(server: Server) -> float:
    return sum(server.metric("quire:num_requests_running").values())


def aborts(server: Server) -> float:
    return sum(server.metric("quire:request_aborts_total").values())


SECONDS = {
    "get": (GET, 0.0),
    "late-get": (GET, 0.3),
    "stream": (request(stream=True), 0.0),
    "late-upload": (request(prompt="a" * 300_000), 0.3),
    "late-garbage": (b"\0garbage", 0.3),
}


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        *((name, number % 2 == 0) for number, name in enumerate(SECONDS)),
        *full_rows((name, number % 2 == 1) for number, name in enumerate(SECONDS)),
    ],
)
def test_requests_of_clients_that_pipelined_and_left_are_aborted(server: Server, stream: bool, name: str) -> None:
    second, wait = SECONDS[name]
    wait_until(lambda: "are made up" in server.stderr, "the last line of the banner")
    printed, before = server.stderr, aborts(server)
    peers = []
    for _ in range(NUM_CLIENTS):
        peer = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        peer.sendall(request(stream=stream) + (b"" if wait else second))
        peers.append(peer)
    wait_until(lambda: running(server) == NUM_CLIENTS, "requests that run")
    if wait:
        time.sleep(wait)  # the second request comes when the answer is under way
        for peer in peers:
            peer.sendall(second)
        time.sleep(wait)
    for peer in peers:
        peer.close()
    wait_until(lambda: running(server) == 0, "the end of requests that nobody waits for")
    assert aborts(server) == before + NUM_CLIENTS and server.stderr == printed
    assert server.complete(max_tokens=2).status == 200

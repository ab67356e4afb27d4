"""The cost of HTTP: the cheap client counts right, and a whole measurement runs against a real server."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import measure_http as bench
import quire
from measure_http_client import drive
from quire.contracts.errors import EngineDead

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    body = b"data: " + data + b"\n\n"
    return b"%x\r\n" % len(body) + body + b"\r\n"


ANSWER = (
    HEAD
    + b"".join(chunk(b'{"text": "data: %d"}' % i) for i in range(5))
    + chunk(b'{"usage": {"prompt_tokens": 9, "completion_tokens": 12}}')
    + chunk(b"[DONE]")
    + b"0\r\n\r\n"
)


@pytest.fixture
def listening() -> Iterator[Callable[[list[bytes]], int]]:
    """Serve connections, each request with the pieces given, one send apiece; returns the port."""
    listeners = []

    def start(pieces: list[bytes]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def one(connection: socket.socket) -> None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection, suppress(ConnectionError):
                while b"\r\n\r\n" in connection.recv(1 << 16):
                    for piece in pieces:
                        connection.sendall(piece)

        def accept() -> None:
            try:
                while True:
                    threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.close()


def ask(port: int, **more: Any) -> dict[str, Any]:
    return drive({"port": port, "path": "/v1/completions", "body": {"prompt": "x"}, "streams": 1, "repeat": 1} | more)


def test_events_and_tokens_of_many_streams(listening: Callable[[list[bytes]], int]) -> None:
    done = ask(listening([ANSWER]), streams=3, repeat=4)
    assert (done["events"], done["tokens"]) == (3 * 4 * 5, 3 * 4 * 12)
    assert len(done["first_s"]) == len(done["whole_s"]) == 12 and done["first_s"] == sorted(done["first_s"])


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_pieces_cut_anywhere_count_the_same(listening: Callable[[list[bytes]], int], size: int) -> None:
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    done = ask(listening(pieces), repeat=2)
    assert (done["events"], done["tokens"]) == (10, 24)


def test_a_refusal_ends_the_run(listening: Callable[[list[bytes]], int]) -> None:
    with pytest.raises(ConnectionError, match="HTTP/1.1 404"):
        ask(listening([b"HTTP/1.1 404 Not Found\r\n\r\n"]))


def test_a_server_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(quire.__file__).parents[1]))
    with pytest.raises(EngineDead, match="max-num-seqs"), bench.mock_server(0.0, 1, "--max-num-seqs", "0"):
        pass


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_case_measures_a_real_server_that_is_gone_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(quire.__file__).parents[1]))
    start, ports = bench.mock_server, list[int]()

    @contextmanager
    def started(*given: Any) -> Iterator[Any]:
        with start(*given) as server:
            ports.append(server.port)
            yield server

    monkeypatch.setattr(bench, "mock_server", started)
    row = bench.measure_case(bench.Case(streams=4, interval=4, step_ms=1.0), seconds=0.1)
    assert row["tokens"] == 400 and 4 * 25 <= row["events"] <= 4 * 28
    assert row["http_cpu_us_per_token"] < row["http_cpu_us_per_event"] or row["http_cpu_us_per_event"] == 0
    assert 0 < row["ttft_median_ms"] <= row["ttft_max_ms"]
    json.dumps(row)
    (port,) = ports
    with pytest.raises(OSError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=1).request("GET", "/health")


def test_a_core_in_this_process_answers_at_once() -> None:
    times = bench._direct_first_tokens(5)
    assert len(times) == 5 and all(seconds > 0 for seconds in times)

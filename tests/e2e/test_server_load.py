"""Clients that leave, and too many clients: nothing is held for the first, nobody is harmed by the second."""

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..support.full import only_full
from .serving import MOCK, Answer, Server, running_server, wait_until
from .test_server_signals import outcome


def begin(server: Server, prompt: str = "Once", path: str = "/v1/completions", **fields: object) -> socket.socket:
    """Send a request and leave its answer unread."""
    asked = {"prompt": prompt, "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True} | fields
    body = json.dumps(asked).encode()
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    peer.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    )
    return peer


def gauge(server: Server, name: str, label: str = "") -> float:
    return sum(value for labels, value in server.metric(f"quire:{name}").items() if label in labels)


def nothing_is_held(server: Server) -> bool:
    """After one more request, whose last step brings the numbers up to date."""
    server.complete("probe", max_tokens=2)
    return (
        gauge(server, "num_requests_running") == gauge(server, "num_requests_waiting") == 0
        and gauge(server, "kv_blocks", 'state="used"') == 0
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything_in_every_phase(stream: bool) -> None:
    flags = ("--mock-step-ms", "20", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
    tokens = "delivered_tokens_total" if stream else "generation_tokens_total"
    with running_server(*MOCK, *flags) as server:
        decoding = [begin(server, f"Story {i}", stream=stream) for i in range(2)]
        wait_until(lambda: gauge(server, "num_requests_running") == 2, "two in decode")
        wait_until(lambda: gauge(server, tokens) >= 6, "tokens")
        queued = [begin(server, f"Tale {i}", stream=stream) for i in range(3)]
        wait_until(lambda: gauge(server, "num_requests_waiting") == 3, "three in the queue")
        for peer in queued:
            peer.close()
        wait_until(lambda: gauge(server, "num_requests_waiting") == 0, "an empty queue")
        for peer in decoding:
            peer.close()
        wait_until(lambda: nothing_is_held(server), "free blocks")
        prefilling = begin(server, "word " * 2000, max_tokens=5, stream=stream)  # 64 tokens in a step
        wait_until(lambda: gauge(server, "num_requests_running") == 1, "one in prefill")
        prefilling.close()
        wait_until(lambda: nothing_is_held(server), "free blocks")
        finished = begin(server, max_tokens=3, stream=stream)
        received = b""
        while b'"finish_reason":"length"' not in received:
            received += finished.recv(65536)
        finished.close()
        wait_until(lambda: nothing_is_held(server), "free blocks")
        aborts = server.metric("quire:request_aborts_total")
        assert sum(value for labels, value in aborts.items() if "disconnect" in labels) == 6
        assert "Traceback" not in server.stderr


def rss(server: Server) -> int:
    """Bytes that the HTTP process holds."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def overload(server: Server, clients: int, more: Callable[[int], bool]) -> list[Answer]:
    """So many clients at once, each asking again and again while `more(times asked)`; all their answers."""
    answers: list[Answer] = []

    def client(number: int) -> None:
        asked = 0
        while more(asked):
            answer = server.complete(f"Story {number % 7}", seed=number % 7, max_tokens=20)
            answers.append(answer)
            asked += 1
            if answer.status == 429:
                time.sleep(0.05)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


FLAGS = (*MOCK, "--mock-step-ms", "5", "--max-num-seqs", "4", "--max-waiting", "4")


def check_overload(server: Server, answers: list[Answer], alone: list[tuple[str, object]]) -> None:
    """Whoever was let in got what they would have got alone; the others were told when to come back."""
    counts = Counter(answer.status for answer in answers)
    assert set(counts) == {200, 429}, counts
    for answer in answers:
        if answer.status == 200:
            assert answer.error() is None and outcome(answer) in alone
        else:
            assert answer.headers["retry-after"] and answer.json()["error"]["type"] == "rate_limit_error"
    wait_until(lambda: nothing_is_held(server), "free blocks")


def test_ten_times_too_many_clients() -> None:
    with running_server(*FLAGS) as server:
        alone = [outcome(server.complete(f"Story {i}", seed=i, max_tokens=20)) for i in range(7)]
        check_overload(server, overload(server, 80, lambda asked: asked < 2), alone)


@only_full
def test_a_minute_of_ten_times_too_many_clients() -> None:
    with running_server(*FLAGS) as server:
        alone = [outcome(server.complete(f"Story {i}", seed=i, max_tokens=20)) for i in range(7)]
        overload(server, 80, lambda asked: asked < 5)
        before, end = rss(server), time.monotonic() + 60.0
        answers = overload(server, 80, lambda asked: time.monotonic() < end)
        check_overload(server, answers, alone)
        assert rss(server) - before < 20 * 2**20, f"{len(answers)} requests"


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    with running_server(*MOCK, "--mock-step-ms", "1") as server, ThreadPoolExecutor(4) as pool:
        with begin(server, n=8, temperature=1.0):
            streams = [pool.submit(server.complete, f"Story {i}", max_tokens=50) for i in range(4)]
            assert all(stream.result().error() is None for stream in streams)
        wait_until(lambda: nothing_is_held(server), "free blocks")

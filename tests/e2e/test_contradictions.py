"""No request makes a fault of the server out of fields that contradict each other; the model computes them for real."""

import http.client
import json
import threading
from collections import Counter

from .fuzz_contradictions import request
from .serving import PATIENCE, Server, running_server, wait_until
from .test_server_load import nothing_is_held

SEED, COUNT, CLIENTS = 1, 334, 4
WORDS = ("a", "b", "{", '"', "1", " a")


def test_no_contradiction_is_a_fault_of_the_server(full: bool) -> None:
    count = 20_000 if full else COUNT
    with running_server("--max-model-len", "256", "--num-threads", "1") as server:
        tokens = {
            word: server.ask("/tokenize", {"prompt": word, "add_special_tokens": False}).json()["tokens"]
            for word in WORDS
        }
        words = {word: ids[0] for word, ids in tokens.items() if len(ids) == 1}
        assert len(words) > 3
        statuses, complaints = Counter[int](), list[str]()
        clients = [
            threading.Thread(target=ask, args=(server, numbers, words, statuses, complaints))
            for numbers in (range(first, count, CLIENTS) for first in range(CLIENTS))
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        print(f"{count} requests; {dict(statuses)}")
        assert not complaints, "\n".join(complaints[:10])
        assert sum(statuses.values()) == count and statuses[200] > count // 5 and statuses[400] > count // 5
        wait_until(lambda: nothing_is_held(server), "free blocks")
        assert "Traceback" not in server.stderr and "internal error" not in server.stderr


def ask(server: Server, numbers: range, words: dict[str, int], statuses: "Counter[int]", complaints: list[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    for number in numbers:
        path, body = request(SEED, number, words)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        statuses[response.status] += 1
        if response.status >= 500 or fault(answer):
            complaints.append(f"{number}: {path} {body}: {response.status} {answer[-300:]!r}")
    connection.close()


def fault(answer: bytes) -> bool:
    """True where an answer, or the last event of a stream, blames the server."""
    return any(mark in answer for mark in (b'"server_error"', b'"api_error"', b"internal error", b'"no_token"'))

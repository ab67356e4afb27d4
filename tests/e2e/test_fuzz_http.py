"""Nothing that a client may send as a body harms the server: it is answered, or refused with a reason, and forgotten.

The same seeded requests in every run: 667 of each kind, damaged ones and ones that the API's own description allows,
100,000 with QUIRE_FULL=1. Request `number` is made from SEED and its number alone.
"""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.contracts.error_bodies import MESSAGES_PATHS

from . import fuzz_schema
from .fuzz_bodies import PRODUCT, Shot, body
from .serving import MOCK, PATIENCE, Server, running_server, wait_until
from .test_server_load import nothing_is_held, rss

SEED = 1
CLIENTS = 8
FLAGS = (*MOCK, "--max-model-len", "128")  # what is valid is answered soon
ERROR_KEYS = {"message", "type", "param", "code"}
BEFORE_IT_IS_READ = {400, 408, 431}  # of the connection, on every route


class Client:
    """A keep-alive connection that sends every n-th request, and what was wrong with the answers."""

    def __init__(self, server: Server, shots: Callable[[int], Shot], document: Any, first: int, count: int) -> None:
        self._shots, self._paths = shots, document["paths"]
        self.statuses: Counter[int | str] = Counter()
        self.complaints: list[str] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self.thread = threading.Thread(target=self._run, args=(range(first, count, CLIENTS),))
        self.thread.start()

    def _run(self, numbers: range) -> None:
        for number in numbers:
            shot = self._shots(number)
            try:
                problem = self._send(shot)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                problem = f"no answer: {error!r}"
            if problem:
                self.complaints.append(f"{number}: {shot.path} {shot.headers}: {problem}; {shot.data[:500]!r}")
                if len(self.complaints) > 3:
                    break
        self._connection.close()

    def _send(self, shot: Shot) -> str:
        """Send one; what is wrong with the answer, or ""."""
        data: bytes | list[bytes] = shot.data
        if shot.chunked:
            data = [shot.data[at : at + 1000] for at in range(0, len(shot.data), 1000)]
        self._connection.request("POST", shot.path, data, shot.headers, encode_chunked=shot.chunked)
        if shot.leaves:
            self._connection.close()
            self.statuses["left"] += 1
            return ""
        response = self._connection.getresponse()
        answer = response.read()
        self.statuses[response.status] += 1
        if response.status == 200:
            if b"internal_error" in answer or b'"type":"server_error"' in answer:
                return f"an error in the stream: {answer[-400:]!r}"
            stream = response.getheader("content-type", "").startswith("text/event-stream")
            return "" if stream or isinstance(json.loads(answer), dict) else f"{answer[:200]!r}"
        described = {int(status) for status in self._paths[shot.path]["post"]["responses"] if status.isdigit()}
        if response.status not in described | BEFORE_IT_IS_READ or 500 <= response.status != 529:
            return f"status {response.status}: {answer[:400]!r}"
        error = json.loads(answer)["error"]
        keys = {"type", "message"} if MESSAGES_PATHS.search(shot.path) else ERROR_KEYS
        return "" if error.keys() == keys and error["message"] else f"no error in the route's form: {answer[:400]!r}"


@pytest.mark.parametrize("kind", ["damaged", "described"])
def test_no_body_harms_the_server(kind: str, full: bool) -> None:
    count = 100_000 if full else 667
    assert len(PRODUCT) < 50_000  # so that the long run sends every field with every odd value
    allowing = ("--trust-request-chat-template", "--pooler-config", '{"pooling_type": "MEAN"}')
    with running_server(*FLAGS, *allowing) as server:
        server.complete("Once")
        document = server.ask("/openapi.json").json()
        before, began = rss(server), time.monotonic()
        damaged = kind == "damaged"
        clients = [
            Client(
                server,
                lambda number: body(SEED, number) if damaged else fuzz_schema.shot(document, SEED, number),
                document,
                first,
                count,
            )
            for first in range(CLIENTS)
        ]
        for client in clients:
            client.thread.join()
        seconds = time.monotonic() - began
        statuses = sum((client.statuses for client in clients), Counter())
        print(
            f"{count} requests in {seconds:.1f} s; {dict(statuses.most_common())}; "
            f"RSS {before / 2**20:.0f} + {(rss(server) - before) / 2**20:.1f} MiB"
        )
        assert not (complaints := [line for client in clients for line in client.complaints]), "\n".join(complaints)
        assert sum(statuses.values()) == count and statuses[200] > count // 50 and statuses[400] > count // 4
        assert damaged or statuses[200] > count // 10
        wait_until(lambda: nothing_is_held(server), "free blocks")
        assert server.ask("/health").status == 200
        assert "Traceback" not in server.stderr and "internal error" not in server.stderr

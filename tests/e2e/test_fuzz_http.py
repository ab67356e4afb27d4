"""Nothing that a client may send as a body harms the server: it is answered, or refused with a reason, and forgotten.

The same seeded requests in every run: 2,000 of them, 100,000 with QUIRE_FULL=1.
"""

import http.client
import json
import threading
import time
from collections import Counter

from .fuzz_bodies import PRODUCT, Shot, body
from .serving import MOCK, PATIENCE, Server, running_server, wait_until
from .test_server_load import nothing_is_held, rss

SEED = 1
CLIENTS = 8
FLAGS = (*MOCK, "--max-model-len", "128")  # what is valid is answered soon
REFUSALS = {400, 404, 408, 413, 415, 422, 429, 431}
ERROR_KEYS = {"message", "type", "param", "code"}


class Client:
    """A keep-alive connection that sends every n-th request, and what was wrong with the answers."""

    def __init__(self, server: Server, first: int, count: int) -> None:
        self.statuses: Counter[int | str] = Counter()
        self.complaints: list[str] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self.thread = threading.Thread(target=self._run, args=(range(first, count, CLIENTS),))
        self.thread.start()

    def _run(self, numbers: range) -> None:
        for number in numbers:
            shot = body(SEED, number)
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
            return "" if b"data: " in answer[:6] or isinstance(json.loads(answer), dict) else f"{answer[:200]!r}"
        if response.status not in REFUSALS:
            return f"status {response.status}: {answer[:400]!r}"
        error = json.loads(answer)["error"]
        return "" if error.keys() == ERROR_KEYS and error["message"] else f"no OpenAI error: {answer[:400]!r}"


def test_no_body_harms_the_server(full: bool) -> None:
    count = 100_000 if full else 2_000
    assert len(PRODUCT) < 50_000  # so that the long run sends every field with every odd value
    with running_server(*FLAGS) as server:
        server.complete("Once")
        before, began = rss(server), time.monotonic()
        clients = [Client(server, first, count) for first in range(CLIENTS)]
        for client in clients:
            client.thread.join()
        seconds = time.monotonic() - began
        statuses = sum((client.statuses for client in clients), Counter())
        print(f"{count} requests in {seconds:.1f} s; {dict(statuses.most_common())}; "
              f"RSS {before / 2**20:.0f} + {(rss(server) - before) / 2**20:.1f} MiB")
        assert not (complaints := [line for client in clients for line in client.complaints]), "\n".join(complaints)
        assert sum(statuses.values()) == count and statuses[200] > count // 50 and statuses[400] > count // 4
        wait_until(lambda: nothing_is_held(server), "free blocks")
        assert server.ask("/health").status == 200
        assert "Traceback" not in server.stderr and "internal error" not in server.stderr

"""Clients of the chaos run: streams that are checked token by token, and those that leave, abort or send nonsense."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proxy import ChaosProxy

from quire.engine.mock_executor import chain, first_digest, next_token

PATIENCE = 120.0  # seconds until a request that is refused, or broken before its first byte, counts as lost
STALLED = 60.0  # seconds without a byte
TOKENS = (16, 48)  # of an answer
MOST_TIMES = 400_000  # latencies that are kept
ENDED = ("backend_failed", "engine_dead", "engine_closed")  # codes of streams that their server could not finish
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
NONSENSE = (
    b"GARBAGE\r\n\r\n",
    POST + b'9\r\n\r\n{"prompt"',  # half of an object
    POST + b'15\r\n\r\n{"prompt":"x"}}',
    POST + b'38\r\n\r\n{"prompt": "x", "temperature": "hot"} ',
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /v1/../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Long: " + b"x" * 100_000 + b"\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
)  # bytes that are no valid request; each ends with status 4xx


class Broken(Exception):
    """A connection that ended before its answer did."""


@dataclass
class Tally:
    """Results of all clients.

    ends      outcome -> number of requests
    faults    sentences about what must not happen
    first     seconds from the first try to the first token, beyond one step
    gaps      seconds between two tokens, beyond one step
    """

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Note a fault; the first hundred are kept."""
        self.ends["FAULT"] += 1
        if len(self.faults) < 100:
            self.faults.append(text)


class Connection:
    """HTTP exchange on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.port = int(writer.get_extra_info("sockname")[1])

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, path: str, body: object = None) -> None:
        """Send a request: POST with a body, else GET."""
        data = b"" if body is None else json.dumps(body).encode()
        kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if data else ""
        head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{kind}\r\n"
        self.writer.write(head.encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers."""
        status = (await self._line()).split()
        headers = {}
        while line := (await self._line()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if len(status) < 2:
            raise Broken
        return int(status[1]), headers

    async def event(self) -> str:
        """Return the data of the next event of a stream in chunks; "" at its end."""
        while True:
            line = (await self._line()).strip()
            if line.startswith(b"data: "):
                return line[6:].decode()
            if line == b"0":  # the last chunk
                return ""

    async def body(self) -> Any:
        """Return the rest, which is JSON, as a value."""
        data = await asyncio.wait_for(self._reader.read(), STALLED)
        return json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])

    async def _line(self) -> bytes:
        try:
            line = await asyncio.wait_for(self._reader.readline(), STALLED)
        except (OSError, ValueError) as error:
            raise Broken from error
        if not line.endswith(b"\n"):
            raise Broken
        return line


class Clients:
    """Clients that ask one after the other until `over`.

    proxy   leads to the router
    direct  returns the ports of the backends
    step    seconds of a step
    """

    def __init__(
        self, proxy: ChaosProxy, direct: Callable[[], list[int]], rng: random.Random, step: float, vocab: int
    ) -> None:
        self.tally, self.over, self.live = Tally(), False, 0
        self._proxy, self._direct, self._rng, self._step, self._vocab = proxy, direct, rng, step, vocab

    async def run(self) -> None:
        """Be one client."""
        kinds = {self._stream: 0.74, self._leave: 0.12, self._nonsense: 0.09, self._abort: 0.05}
        await asyncio.sleep(self._rng.random() * 2)
        while not self.over:
            kind = self._rng.choices([*kinds], [*kinds.values()])[0]
            self.live += 1
            try:
                await kind()
            except TimeoutError:
                self.tally.fault(f"{kind.__name__}: no byte for {STALLED:g} s")
            except Exception as error:  # a fault of this tool, or an answer that nobody expects
                self.tally.fault(f"{kind.__name__}: {type(error).__name__}: {error}")
            finally:
                self.live -= 1

    async def _stream(self) -> None:
        """A stream. It is sent again when it was refused with Retry-After, or broke before its first byte."""
        prompt = [self._rng.randrange(3, self._vocab) for _ in range(self._rng.randrange(4, 40))]
        count, seed, began = self._rng.randrange(*TOKENS), self._rng.randrange(2**31), time.monotonic()
        asked = {"prompt": prompt, "max_tokens": count, "seed": seed, "stream": True, "ignore_eos": True}
        while True:
            answer = expected(prompt, seed, count, self._vocab)
            wait = await self._try(asked | {"return_token_ids": True}, answer, began)
            if wait is None:
                return
            if time.monotonic() - began > PATIENCE:
                return self.tally.fault(f"a stream was not served within {PATIENCE:g} s")
            if self.over:
                return
            await asyncio.sleep(wait)

    async def _try(self, body: dict[str, Any], tokens: list[int], began: float) -> float | None:
        """Ask once. Return the seconds to wait before the next try, or None at the end. began: time of the first try"""
        ends, found, connection = self.tally.ends, list[int](), None
        try:
            connection = await Connection.open(self._proxy.port)
            last = began
            connection.send("/v1/completions", body)
            status, headers = await connection.head()
            if status != 200:
                ends[f"status {status}"] += 1
                if status not in (429, 503) or "retry-after" not in headers:
                    self.tally.fault(f"status {status} with {headers}: {await connection.body()}")
                    return None
                return float(headers["retry-after"]) * self._rng.uniform(0.2, 1.0)
            while (data := await connection.event()) != "[DONE]":
                event = json.loads(data) if data else {"error": {"code": "no [DONE]", "message": "the stream ended"}}
                if "error" in event:
                    return self._failed(event["error"], found)
                new = [one for choice in event["choices"] for one in choice.get("token_ids") or ()]
                now = time.monotonic()
                times = self.tally.gaps if found else self.tally.first
                if new and len(times) < MOST_TIMES and not self._proxy.slowed(connection.port):
                    times.append(now - last - self._step * (len(new) if found else 1))
                last = now if new else last
                found += new
            if found != tokens:
                self.tally.fault(f"wrong tokens: {found[:8]}..., expected {tokens[:8]}... ({len(found)}/{len(tokens)})")
            ends["complete"] += 1
            return None
        except (Broken, OSError):
            if connection is None or self._proxy.harmed(connection.port):
                ends["broken by the proxy"] += 1
                return None if found else 0.1
            self.tally.fault(f"a connection broke, and not by the proxy, after {len(found)} tokens")
            return None
        finally:
            if connection is not None:
                connection.writer.transport.abort()

    def _failed(self, error: dict[str, Any], found: list[int]) -> None:
        """Note a stream that ended with an error event."""
        if error["code"] not in ENDED or not found:
            self.tally.fault(f"error after {len(found)} tokens: {error}")
        self.tally.ends[f"error event {error['code']}"] += 1

    async def _leave(self) -> None:
        """A client that closes its connection after a while."""
        connection = await Connection.open(self._proxy.port)
        connection.send(
            "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4000, "stream": True, "ignore_eos": True}
        )
        await asyncio.sleep(self._rng.random() * 20 * self._step)
        connection.writer.transport.abort()
        self.tally.ends["left"] += 1

    async def _nonsense(self) -> None:
        """A client that sends bytes that are no request. It gets 4xx, or no answer from a proxy that cut it."""
        connection = await Connection.open(self._proxy.port)
        data = self._rng.choice(NONSENSE)
        try:
            connection.writer.write(data)
            status, _ = await connection.head()
            if not 400 <= status < 500 and status not in (501, 503):
                self.tally.fault(f"nonsense was answered {status}: {data[:60]!r}")
            self.tally.ends["nonsense refused"] += 1
        except (Broken, OSError):
            self.tally.ends["nonsense cut"] += 1
        finally:
            connection.writer.transport.abort()

    async def _abort(self) -> None:
        """A response in the background of one backend, which is cancelled. Its backend may die meanwhile."""
        port = self._rng.choice(self._direct())
        try:
            connection = await Connection.open(port)
            connection.send("/v1/responses", {"input": "Once", "background": True, "max_output_tokens": 4000})
            status, _ = await connection.head()
            if status == 200:
                made = await connection.body()
                await asyncio.sleep(self._rng.random() * 4 * self._step)
                connection = await Connection.open(port)
                connection.send(f"/v1/responses/{made['id']}/cancel", {})
                status, _ = await connection.head()
        except (Broken, OSError, ValueError):
            status = 0
        self.tally.ends["aborted" if status == 200 else "not aborted"] += 1
        if status not in (0, 200, 404, 503):
            self.tally.fault(f"a background response was answered {status}")


def expected(prompt: list[int], seed: int, count: int, vocab: int) -> list[int]:
    """Return the tokens that the mock makes for a prompt."""
    digest, tokens = first_digest(""), list[int]()
    for token in prompt:
        digest = chain(digest, token)
    for _ in range(count):
        tokens.append(next_token(digest, seed, vocab))
        digest = chain(digest, tokens[-1])
    return tokens

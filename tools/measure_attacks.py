"""Limits under attack: what an attacker gets, what a user beside it feels, and what stays in memory.

    python tools/measure_attacks.py [ATTACK ...] [--seconds X] [--json]

`quire serve --device mock` runs as a child, with a file of 1,000 keys that have limits. Another process attacks it.
This one is the user: it sends short completions with a key of its own, one after the other. All of it is on the
loopback address.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import random
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure_http import mock_server
from process_time import cpu_seconds
from quire.entry.cli.table import format_table
from quire.observe.process import resident_bytes

KEYS = 1_000
STEP_MS, SLOTS = 5.0, 64
ASKED = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
BODY = 8_000_000  # bytes, just below --max-body-bytes
REST = 3.0  # seconds after an attack in which the server forgets it
PATHS = r"""
/metrics /metrics/ /METRICS /metrics%20 /metrics%00 /%6detrics //metrics ///metrics /./metrics /debug/plan
/v1/../metrics /v1/%2e%2e/metrics /v1/models/../../metrics /v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd
/health/../metrics /health%2f..%2fmetrics /health;/metrics /health%00/metrics /debug/requests/%2e%2e
/web/../../../etc/passwd /web/%2e%2e/%2e%2e/etc/passwd /web/..%2f..%2fetc/passwd /web/..\..\etc\passwd /web//etc/passwd
/web/app.js%00.png /v1/responses/..%2f..%2fx /%zz /%ff%fe * http://localhost/metrics http://evil.example/metrics
http://u@localhost/metrics https://localhost/metrics //evil.example/x
""".split()
COLUMNS = {
    "attack": "attack",
    "sent": "sent",
    "answers": "answers",
    "requests": "user's requests",
    "median_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "http_cpu": "HTTP CPU, %",
    "peak_mb": "memory, most, MB",
    "left_mb": "left, MB",
}

Outcome = Counter[str]


class Peer:
    """A connection of the attacker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> "Peer":
        """Open a connection. `receive_buffer`: bytes that the kernel takes for a reader that does not read."""
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=raw, limit=2**16))

    async def send(self, *pieces: bytes) -> None:
        """Send bytes. A server that has closed is no error: its answer may be there."""
        try:
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()
        except ConnectionError:
            pass

    async def status(self) -> str:
        """Return the status of the next answer; "closed" without one. Read the whole answer."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(
                (line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b""
            )
            if length:
                await self.reader.readexactly(int(length))
            else:
                while not (await self.reader.readline()).startswith(b"0\r\n"):
                    pass
                await self.reader.readline()
        except (asyncio.IncompleteReadError, ConnectionError):
            return "closed"
        return head.split(b" ", 2)[1].decode()

    def close(self) -> None:
        """Close at once."""
        self.writer.transport.abort()


def request(target: str = "/v1/completions", body: bytes | None = None, key: str = "", *extra: str) -> bytes:
    """Return the bytes of a request. A body of None makes it a GET."""
    lines = [f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", "Host: localhost", *extra]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def completion(**fields: Any) -> bytes:
    """Return the body of a completion."""
    return json.dumps(ASKED | fields).encode()


Attacker = Callable[[int, float, Outcome], Coroutine[Any, Any, None]]  # port, time of its end, what it got


async def repeated(made: Callable[[], bytes | list[bytes]], port: int, end: float, got: Outcome) -> None:
    """Send requests one after the other, on a new connection whenever the server closes."""
    peer: Peer | None = None
    while time.monotonic() < end:
        peer = peer or await Peer.connect(port)
        pieces = made()
        got["sent"] += 1
        await peer.send(*([pieces] if isinstance(pieces, bytes) else pieces))
        status = await peer.status()
        got[status] += 1
        if status not in ("200", "400", "401", "404", "429"):
            peer.close()
            peer = None


def many(made: Callable[[], bytes | list[bytes]], connections: int) -> Attacker:
    """Return an attacker that sends such requests on so many connections."""

    async def attack(port: int, end: float, got: Outcome) -> None:
        await asyncio.gather(*(repeated(made, port, end, got) for _ in range(connections)))

    return attack


def slow(first: bytes, more: bytes, connections: int, receive_buffer: int | None = None) -> Attacker:
    """Return an attacker that sends `first`, then `more` each second, and never reads."""

    async def one(port: int, end: float, got: Outcome) -> None:
        got["sent"] += 1
        peer = await Peer.connect(port, receive_buffer)
        await peer.send(first)
        while time.monotonic() < end and not peer.writer.is_closing():
            await asyncio.sleep(1)
            await peer.send(more)
            if more and not peer.reader.at_eof() and peer.reader._buffer:  # type: ignore[attr-defined]
                got[await peer.status()] += 1
                break
        else:
            got["open at the end"] += not peer.writer.is_closing()
        peer.close()

    async def attack(port: int, end: float, got: Outcome) -> None:
        await asyncio.gather(*(one(port, end, got) for _ in range(connections)))

    return attack


async def _paths(port: int, end: float, got: Outcome) -> None:
    """Every path without a key: none may be served."""
    while time.monotonic() < end:
        for path in PATHS:
            peer = await Peer.connect(port)
            got["sent"] += 1
            await peer.send(request(path))
            status = await peer.status()
            got[f"{status} for {path}" if status == "200" else status] += 1
            peer.close()


async def _silent(port: int, end: float, got: Outcome) -> None:
    """1,000 connections that send nothing, each opened again when the server has closed it."""

    async def one() -> None:
        while time.monotonic() < end:
            got["sent"] += 1
            peer = await Peer.connect(port)
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await peer.reader.read()
                got["closed"] += 1
            except ConnectionError:
                got["closed"] += 1
            except TimeoutError:
                got["open at the end"] += 1
            peer.close()

    await asyncio.gather(*(one() for _ in range(1000)))


def _of_a_key() -> bytes:
    return request(body=completion(), key=f"sk-{random.randrange(KEYS)}")


def _bomb() -> bytes:
    return gzip.compress(completion(prompt=" " * 200_000_000))


def _headers() -> list[bytes]:
    return [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"".join(b"x-%d: a\r\n" % i for i in range(100_000)),
        b"\r\n",
    ]


def _chunks() -> list[bytes]:
    head = request("/v1/completions", b"", "sk-flood", "Transfer-Encoding: chunked")
    return [head.replace(b"Content-Length: 0\r\n", b""), b"1\r\n[\r\n" * (BODY // 4), b"0\r\n\r\n"]


def flood(key: str = "sk-flood", **fields: Any) -> Callable[[], bytes]:
    """Return a function that makes completions of a key."""
    made = request(body=completion(**fields), key=key)
    return lambda: made


def body(target: str, text: bytes, *extra: str) -> Callable[[], bytes]:
    """Return a function that makes requests with this body."""
    made = request(target, text, "sk-flood", *extra)
    return lambda: made


def _wide() -> bytes:
    return b"{%s}" % b",".join(b'"k%d":1' % i for i in range(BODY // 13))


TRICKLE = request(body=b"", key="sk-flood").replace(b"Content-Length: 0", b"Content-Length: 1000000")
BODY_WITHOUT_KEY = request(body=b" " * 200_000)
LONG = {"prompt": list(range(100, 3000)), "max_tokens": 1000, "ignore_eos": True, "stream": True}
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: "
# Name -> function that makes the attacker, and factor of its time: limits on time are seen when they have passed.
ATTACKS: dict[str, tuple[Callable[[], Attacker], float]] = {
    "none": (lambda: many(lambda: b"", 0), 1),
    "1,000 keys with limits": (lambda: many(_of_a_key, 64), 1),
    "keys that do not exist": (lambda: many(lambda: request(body=completion(), key=f"no-{random.random()}"), 64), 1),
    "bodies of 200 KB without a key": (lambda: many(lambda: BODY_WITHOUT_KEY, 64), 1),
    "token flood": (lambda: many(flood(**LONG), 512), 2),
    "token flood, key with limits": (lambda: many(flood("sk-bounded", **LONG), 512), 2),
    "texts of 8 MB": (lambda: many(flood(prompt="word " * (BODY // 6)), 4), 1),
    "slow readers": (lambda: slow(flood(max_tokens=4000, ignore_eos=True, stream=True)(), b"", 48, 4096), 3),
    "slow headers": (lambda: slow(HALF_HEAD, b"a", 1000), 3),
    "slow bodies": (lambda: slow(TRICKLE, b"[", 500), 8),
    "100,000 headers": (lambda: many(_headers, 8), 1),
    "compression bombs": (lambda: many(body("/v1/completions", _bomb(), "Content-Encoding: gzip"), 8), 1),
    "path tricks": (lambda: _paths, 1),
    "deep JSON": (lambda: many(body("/v1/chat/completions", b'{"messages":' + b"[" * (BODY - 20)), 4), 1),
    "wide JSON": (lambda: many(body("/v1/completions", _wide()), 4), 1),
    "chunks of one byte": (lambda: many(_chunks, 4), 1),
    "TLS: none": (lambda: many(lambda: b"", 0), 1),
    "TLS: silent": (lambda: _silent, 3),
}


def attack_in_child(name: str, port: int, seconds: float, results: Any) -> None:
    """Attack, and send what came of it. Runs in a process of its own."""

    async def run() -> Outcome:
        got: Outcome = Counter()
        try:
            async with asyncio.timeout(seconds + 60):
                await attacker(port, time.monotonic() + seconds, got)
        except TimeoutError:
            got["unanswered"] = got["sent"] - sum(count for what, count in got.items() if what != "sent")
        return got

    attacker = ATTACKS[name][0]()
    results.put("ready")
    results.put(asyncio.run(run()))


@dataclass
class User:
    """The one who has done nothing wrong. With `tls`, each of its requests has a connection of its own.

    seconds  times of its requests
    peak     most memory meanwhile
    """

    port: int
    pids: list[int]
    tls: bool = False

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = 0

    def ask(self, until: Callable[[], bool]) -> None:
        """Send requests until it is enough."""
        peer: socket.socket | None = None
        while not until():
            begin = time.perf_counter()
            peer = peer or self._connect()
            self._request(peer)
            self.seconds.append(time.perf_counter() - begin)
            self.peak = max(self.peak, memory(self.pids))
            if self.tls:
                peer.close()
                peer = None
            time.sleep(0.005)
        if peer is not None:
            peer.close()

    def _connect(self) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return ssl._create_unverified_context().wrap_socket(peer) if self.tls else peer

    def _request(self, peer: socket.socket) -> None:
        peer.sendall(request(body=completion(), key="sk-user"))
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            piece = peer.recv(65536)
            assert piece, "the server has left the user"
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


def memory(pids: list[int]) -> int:
    """Return the bytes that processes hold."""
    return sum(resident_bytes(pid) or 0 for pid in pids)


def measure(name: str, factor: float, seconds: float, port: int, pids: list[int]) -> dict[str, Any]:
    """Run one attack, with a user beside it."""
    results: Any = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(
        target=attack_in_child, args=(name, port, seconds * factor, results)
    )
    child.start()
    assert results.get() == "ready"
    user, before, cpu = User(port, pids, is_tls(name)), memory(pids), cpu_seconds(pids[0]) or 0.0
    begin = time.monotonic()
    user.ask(lambda: not results.empty() and time.monotonic() > begin + 1)
    used, took = (cpu_seconds(pids[0]) or 0.0) - cpu, time.monotonic() - begin
    got = results.get()
    child.join()
    time.sleep(REST)
    sent = got.pop("sent", 0)
    return {
        "attack": name,
        "sent": sent,
        "answers": ", ".join(f"{what}: {count:,}" for what, count in sorted(got.items())),
        "requests": len(user.seconds),
        "median_ms": round(1e3 * statistics.median(user.seconds), 1),
        "p99_ms": round(1e3 * sorted(user.seconds)[int(0.99 * len(user.seconds))], 1),
        "http_cpu": round(100 * used / took),
        "peak_mb": round((user.peak - before) / 1e6),
        "left_mb": round((memory(pids) - before) / 1e6),
    }


def key_file(folder: str) -> str:
    """Write the keys. Return the name of their file."""
    limits = {"requests_per_minute": 2, "tokens_per_minute": 200, "concurrency": 2}
    keys = {f"k{i}": {"key": f"sk-{i}", **limits} for i in range(KEYS)}
    keys |= {name: {"key": f"sk-{name}"} for name in ("user", "flood")}
    keys["bounded"] = {"key": "sk-bounded", "concurrency": 8, "requests_per_minute": 600}
    path = Path(folder, "keys.json")
    path.write_text(json.dumps({"keys": keys}))
    return str(path)


def certificate(folder: str) -> tuple[str, ...]:
    """Make a certificate. Return the flags of a server that has it."""
    key, made = str(Path(folder, "key.pem")), str(Path(folder, "cert.pem"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", made], capture_output=True, check=True)
    return ("--ssl-certfile", made, "--ssl-keyfile", key)


def is_tls(name: str) -> bool:
    """Return True for an attack on a server with TLS."""
    return name.startswith("TLS")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attack", nargs="*", help="words of the attacks to run; default: all")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of each attack; those against time limits take longer"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = {
        name: factor
        for name, (_, factor) in ATTACKS.items()
        if not args.attack or any(word in name for word in args.attack)
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--api-key-file", key_file(folder), "--max-num-seqs", str(SLOTS))
        for tls in (False, True):
            attacks = {name: factor for name, factor in chosen.items() if is_tls(name) is tls}
            if not attacks:
                continue
            with mock_server(STEP_MS, 1, *flags, *(certificate(folder) if tls else ())) as server:
                pids = [server.pid, *children(server.pid)]
                User(server.port, pids, tls).ask(iter([False] * 50 + [True]).__next__)
                rows += [measure(name, factor, args.seconds, server.port, pids) for name, factor in attacks.items()]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print(format_table([*COLUMNS.values()], [[row[name] for name in COLUMNS] for row in rows]))


if __name__ == "__main__":
    main()

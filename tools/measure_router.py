"""Cost and hit rate of `quire route`.

    python tools/measure_router.py overhead [--streams 64] [--events 200]
    python tools/measure_router.py requests [--backends 1 64] [--policies ...] [--seconds 5] [--concurrency 32]
    python tools/measure_router.py choice [--backends 64]
    python tools/measure_router.py turns [--backends 4] [--conversations 200] [--turns 8] [--blocks 3000]

overhead: processor time of the router per streamed event, beside the time from a piece's arrival to its writing. The
backend, the router and the client are three processes. requests: short answers, one at a time and many at once, without
and with a router; one process plays all backends. choice: of a backend, in this process, without a network. turns:
conversations whose every turn repeats the one before, on `quire serve --device mock` backends with prefix caches of
limited size: the share of the prompts' tokens that the backends had, by policy; with --routers 2 every turn goes to one
of two routers by chance.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import aiohttp

from process_time import cpu_seconds
from quire.router.affinity import PrefixTable
from quire.router.backends import Backend
from quire.router.policy import Chooser, Sight
from quire.router.settings import router_config

FULL = 262_144  # chunks of a full table of prefixes
WORDS = "the cat sat on a mat and looked at the rain while seven small birds sang in the old tree".split()
BACKEND = """
import asyncio, socket, sys
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = next((int(l[15:]) for l in head.lower().split(b"\\r\\n") if l.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            if b'"stream": true' not in body:
                text = b'{"id":"cmpl-0","choices":[{"index":0,"text":" token"}]}' if body else b""
                writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(text), text))
                continue
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\n"
                         b"transfer-encoding: chunked\\r\\n\\r\\n")
            event = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" token","logprobs":null}]}\\n\\n'
            for _ in range(int(sys.argv[1])):
                writer.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
                await asyncio.sleep(float(sys.argv[2]))
            writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    servers = [await asyncio.start_server(serve, "127.0.0.1", int(port)) for port in sys.argv[3:]]
    await asyncio.gather(*(server.serve_forever() for server in servers))
asyncio.run(main())
"""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    *command: str, url: str = "", seconds: float = 60, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process for the time of a `with`, and wait until it answers at `url`, at most `seconds`."""
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + seconds
        while url:
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None, f"{command} does not answer at {url}"
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def overhead(args: argparse.Namespace) -> None:
    """Measure and print the cost of an event."""
    back, front = free_port(), free_port()
    with (
        started("-c", BACKEND, str(args.events), str(args.interval), str(back), url=f"http://127.0.0.1:{back}/health"),
        started(
            "-m",
            "quire",
            "route",
            "--backend",
            f"http://127.0.0.1:{back}",
            "--port",
            str(front),
            url=f"http://127.0.0.1:{front}/ready",
        ) as router,
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def stream(url: str) -> int:
                count = 0
                async with session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                    async for line in answer.content:
                        count += line.startswith(b"data: ")
                return count

            for url in (f"http://127.0.0.1:{back}", f"http://127.0.0.1:{front}"):
                before, began = cpu_seconds(router.pid), time.perf_counter()
                counts = await asyncio.gather(*(stream(url) for _ in range(args.streams)))
                took, after = time.perf_counter() - began, cpu_seconds(router.pid)
                assert before is not None and after is not None and set(counts) == {args.events}
                if url.endswith(str(front)):
                    used = after - before
                    print(
                        f"{sum(counts)} events in {took:.2f} s: {used / sum(counts) * 1e6:.1f} us of the router's "
                        "processor time per event"
                    )
                else:
                    print(f"{sum(counts)} events in {took:.2f} s without the router")
            async with session.get(f"http://127.0.0.1:{front}/metrics") as scraped:
                text = await scraped.text()
    total, count = (float(re.search(rf"piece_seconds_{part} (\S+)", text)[1]) for part in ("sum", "count"))  # type: ignore[index]
    print(f"{total / count * 1e6:.1f} us from a piece's arrival to its writing, mean of {count:.0f}")


async def requests(args: argparse.Namespace) -> None:
    """Measure and print the cost of a request."""
    for count in args.backends:
        ports, front = [free_port() for _ in range(count)], free_port()
        with started("-c", BACKEND, "0", "0", *map(str, ports), url=f"http://127.0.0.1:{ports[0]}/health"):
            alone, _ = await _asked(ports[0], 1, args.seconds)
            print(f"{count:2} backends, none between: {alone * 1e6:.0f} us, median of requests one after the other")
            for policy in args.policies:
                command = ["-m", "quire", "route", "--policy", policy, "--port", str(front)]
                command += [f"--backend=http://127.0.0.1:{port}" for port in ports]
                with started(*command, url=f"http://127.0.0.1:{front}/ready") as router:
                    began = cpu_seconds(router.pid)
                    await asyncio.sleep(args.seconds)
                    idle = ((cpu_seconds(router.pid) or 0.0) - (began or 0.0)) / args.seconds
                    through, _ = await _asked(front, 1, args.seconds)
                    before = cpu_seconds(router.pid)
                    _, number = await _asked(front, args.concurrency, args.seconds)
                    used = (cpu_seconds(router.pid) or 0.0) - (before or 0.0)
                    print(
                        f"{count:2} backends, {policy:16} {(through - alone) * 1e6:5.0f} us added (median), "
                        f"{number / args.seconds:6.0f} requests/s, {used / number * 1e6:4.0f} us of the router's "
                        f"processor time each; {idle:.1%} of a core while nobody asks",
                        flush=True,
                    )


async def _asked(port: int, concurrency: int, seconds: float) -> tuple[float, int]:
    """Send completions with prompts of 2,000 bytes for some seconds; return their median time and their number."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        draw = random.Random(number)
        text = " ".join(draw.choices(WORDS, k=520))[:2_000]
        while (began := time.perf_counter()) < end:
            text = text[100:] + " ".join(draw.choices(WORDS, k=30))[:100]
            body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = re.search(rb"content-length: (\d+)", head.lower())
            assert length is not None or b"chunked" in head.lower(), head
            await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
            times.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(ask(number) for number in range(concurrency)))
    return statistics.median(times), len(times)


async def choice(args: argparse.Namespace) -> None:
    """Time the choice among backends by policy, the look for those that may be asked, and the loss of one of them."""
    for policy in args.policies:
        given = {"backend": [f"http://127.0.0.1:{9000 + i}" for i in range(args.backends)], "policy": policy}
        config = router_config(given)
        backends = [Backend(number, member, config) for number, member in enumerate(config.backend)]
        for one in backends:
            one.up = True
        chooser = Chooser(config, backends)
        sight = Sight(total=1_000, cached={number: 100 for number in range(0, len(backends), 2)}, session=12345)
        print(f"{policy}: {_microseconds(lambda: chooser.pick(sight, backends), 2_000):.1f} us a choice")  # noqa: B023
    print(f"those that may be asked: {_microseconds(lambda: [one for one in backends if one.usable], 2_000):.1f} us")
    table = PrefixTable(FULL)
    for at in range(FULL):
        table.add([at], at % args.backends)
    print(f"forgetting a backend, {FULL:,} chunks known: {_microseconds(lambda: table.forget(0), 1) / 1000:.0f} ms")


def _microseconds(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


async def turns(args: argparse.Namespace) -> None:
    """Measure and print the hit rate of each policy."""
    for policy in args.policies:
        ports = [free_port() for _ in range(args.backends)]
        fronts = [free_port() for _ in range(args.routers)]
        with contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(
                    started(
                        "-m",
                        "quire",
                        "serve",
                        "--device",
                        "mock",
                        "--port",
                        str(port),
                        "--num-blocks",
                        str(args.blocks),
                        "--mock-step-ms",
                        str(args.step_ms),
                        url=f"http://127.0.0.1:{port}/ready",
                    )
                )
            for front in fronts:
                command = ["-m", "quire", "route", "--policy", policy, "--port", str(front)]
                command += [f"--backend=http://127.0.0.1:{port}" for port in ports]
                stack.enter_context(started(*command, url=f"http://127.0.0.1:{front}/ready"))
            began = time.perf_counter()
            cached, total = await _converse(args, [f"http://127.0.0.1:{front}" for front in fronts])
            print(
                f"{policy:16} {cached / total:6.1%} of {total} prompt tokens cached, "
                f"{time.perf_counter() - began:.1f} s",
                flush=True,
            )


async def _converse(args: argparse.Namespace, urls: list[str]) -> tuple[int, int]:
    """Hold all conversations; return cached tokens and tokens of all prompts."""
    counts = [0, 0]
    limit = asyncio.Semaphore(args.concurrency)

    async def talk(number: int, session: aiohttp.ClientSession) -> None:
        draw = random.Random(number)
        messages: list[dict[str, Any]] = []
        for _ in range(args.turns):
            messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=args.words))})
            body = {
                "messages": messages,
                "max_tokens": args.output,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            url = draw.choice(urls)
            async with limit, session.post(f"{url}/v1/chat/completions", json=body) as answer:
                lines = (await answer.read()).decode().split("\n\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
            messages.append({"role": "assistant", "content": "".join(pieces)})
            usage = events[-1]["usage"]
            counts[0] += usage["prompt_tokens_details"]["cached_tokens"]
            counts[1] += usage["prompt_tokens"]
            await asyncio.sleep(draw.uniform(0, args.pause))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(talk(number, session) for number in range(args.conversations)))
    return counts[0], counts[1]


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("overhead")
    one.add_argument("--streams", type=int, default=64)
    one.add_argument("--events", type=int, default=200)
    one.add_argument("--interval", type=float, default=0.02, help="seconds between events of a stream")
    few = kinds.add_parser("requests")
    few.add_argument("--backends", type=int, nargs="+", default=[1, 64])
    few.add_argument("--policies", nargs="+", default=["least-load", "prefix-affinity", "consistent-hash"])
    few.add_argument("--seconds", type=float, default=5.0)
    few.add_argument("--concurrency", type=int, default=32)
    own = kinds.add_parser("choice")
    own.add_argument("--backends", type=int, default=64)
    own.add_argument("--policies", nargs="+", default=["least-load", "prefix-affinity", "consistent-hash"])
    two = kinds.add_parser("turns")
    for name, default in {
        "backends": 4,
        "routers": 1,
        "conversations": 200,
        "turns": 8,
        "blocks": 3_000,
        "output": 64,
        "words": 180,
        "concurrency": 64,
    }.items():
        two.add_argument(f"--{name}", type=int, default=default)
    two.add_argument("--step-ms", type=float, default=2.0)
    two.add_argument("--pause", type=float, default=0.5, help="longest pause between two turns, in seconds")
    two.add_argument(
        "--policies", nargs="+", default=["round-robin", "least-load", "prefix-affinity", "consistent-hash"]
    )
    args = parser.parse_args()
    asyncio.run({"overhead": overhead, "requests": requests, "choice": choice, "turns": turns}[args.kind](args))


if __name__ == "__main__":
    main()

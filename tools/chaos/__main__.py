"""A chaos run on the mock: clients, a proxy that harms connections, and processes that are killed in turn.

    python tools/chaos --minutes 10 --streams 500        ten minutes
    python tools/chaos --hours 6 --streams 50            a soak; memory may grow by 1 MB an hour

Three backends (`quire serve --device mock --restart`, two HTTP processes each) stand behind `quire route`. Every
`--every` seconds one is killed with SIGKILL: the engine core of the first backend, an HTTP process of the second one,
the whole third one, which is then started again as a service manager does. Clients reach the router through the proxy.

It is a fault, and the exit code is 1, when an answer has other tokens than the mock makes, breaks off without the
proxy's doing, ends with an error before its first token, or is not served within two minutes of tries; when a refusal
lacks Retry-After; when a stored response of the first two backends is lost; when at the end a request, a KV block, a
process, a socket, a file or a descriptor is left. Prints the times to serve again, latencies beyond the steps, and
the slopes of memory, descriptors and threads.
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from clients import Clients, Connection, Tally
from proxy import ChaosProxy
from servers import Server, running
from watch import Curves, slope

from quire.config.bundled import bundled_model

ROUNDS = (("core of a server", 0, "core"), ("HTTP process", 1, "front"), ("whole server", 2, "http"))
CALM = 0.15  # share of the run before the first kill, with a proxy that harms nothing
FILLING, INPUTS = 4, 100  # clients of each server that fill its memories, and the requests of each
WORDS = 2200  # of such a request: 12 KB, and almost as many tokens as the context has
LOOK_SECONDS = 2.0
LONG = 3600.0  # seconds from which on a run is a soak: memory may grow little
MOST_GROWTH = 1024.0  # KiB an hour
ONE_STEP = 1536  # KiB: an arena of Python's allocator, 1 MiB, comes at once, and is no slope
IDLE_SECONDS = 120.0  # until the servers must be idle after the last client; kept connections last 75 s


def main() -> int:
    """Run, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--streams", type=int, default=500, help="clients at once")
    parser.add_argument("--step-ms", type=float, default=200.0, help="time of a step of the mock")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="file for the curves and all numbers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder:
        run = Run(args, Path(folder))
        try:
            asyncio.run(run.go())
        finally:
            for server in run.servers:
                if server.process.poll() is None:
                    server.process.kill()
        return run.report()


class Run:
    """A whole run."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.seconds = (args.hours * 60 or args.minutes) * 60
        self.rng = random.Random(args.seed)
        self.again: dict[str, list[float]] = defaultdict(list)
        self.shared = set(os.listdir("/dev/shm"))
        slots = max(64, args.streams)
        words = ("serve", "--device", "mock", "--mock-step-ms", f"{args.step_ms:g}", "--max-num-seqs", str(slots))
        words += ("--api-server-count", "2", "--restart", "1000000", "--disable-log-stats", "--num-gpu-blocks-override")
        words += (str(8 * slots),)
        self.backends = [Server(f"backend {number}", folder, *words) for number in range(3)]
        urls = [word for one in self.backends for word in ("--backend", f"http://127.0.0.1:{one.port}")]
        self.router = Server("router", folder, "route", *urls, "--health-interval", "0.5", "--first-byte-timeout", "60")
        self.servers = [self.router, *self.backends]
        self.curves = Curves(self.servers)
        self.calm: dict[str, list[float]] = {}
        self.tally = Tally()
        self.proxied: dict[str, int] = {}

    async def go(self) -> None:
        """Let everything happen."""
        for server in self.servers:
            await server.until_ready()
        vocab = json.loads((bundled_model() / "config.json").read_text())["vocab_size"]
        proxy = ChaosProxy(self.router.port, self.rng)
        await proxy.start()
        step = self.args.step_ms / 1000
        clients = Clients(proxy, lambda: [one.port for one in self.backends], self.rng, step, vocab)
        self.tally = clients.tally
        if self.seconds >= LONG:
            await asyncio.gather(*(self._fill(server) for server in self.backends * FILLING))
        tasks = [asyncio.create_task(clients.run()) for _ in range(self.args.streams)]
        looking = asyncio.create_task(self._look())
        end = time.monotonic() + self.seconds
        await asyncio.sleep(min(60.0, CALM * self.seconds))
        self.calm = {"first": self.tally.first[:], "gaps": self.tally.gaps[:]}
        self.tally.first.clear()
        self.tally.gaps.clear()
        proxy.harm = True
        kept = [await self._store(one) for one in self.backends[:2]]
        await self._kill_in_turn(end)
        proxy.harm = False
        clients.over = True
        await asyncio.wait(tasks, timeout=180)
        if clients.live:
            self.tally.fault(f"{clients.live} clients got no end")
        for server, response in zip(self.backends, kept, strict=False):
            found = await self._fetch(server, response)
            if found != response:
                self.tally.fault(f"a stored response of {server.name} is lost: {found}")
        await proxy.close()
        self.proxied = proxy.counts
        await self._idle()
        looking.cancel()
        self._end()

    async def _kill_in_turn(self, end: float) -> None:
        number = 0
        while (left := end - time.monotonic()) > 0:
            name, backend, role = ROUNDS[number % len(ROUNDS)]
            number += 1
            began = time.monotonic()
            try:
                self.again[name].append(await self.backends[backend].kill(role))
            except TimeoutError:
                self.tally.fault(f"{self.backends[backend].name} did not come back after the end of its {role}")
            except StopIteration:
                self.tally.fault(f"{self.backends[backend].name} has no {role}")
            await asyncio.sleep(max(0.0, min(left, self.args.every - (time.monotonic() - began))))

    async def _fill(self, server: Server) -> None:
        """Fill what the processes of a server remember, which at a low load takes hours and would count as growth: the
        keys of dropped KV blocks, and the pages of stored responses (2 MB in each HTTP process)."""
        for _ in range(INPUTS):
            connection = await Connection.open(server.port)
            text = " ".join(self.rng.choices(str(__doc__).split(), k=WORDS))
            connection.send("/v1/responses", {"input": text, "max_output_tokens": 1})
            status, _ = await connection.head()
            made = await connection.body()
            if status != 200:
                self.tally.fault(f"a long input was answered {status} by {server.name}: {made}")

    async def _look(self) -> None:
        while True:
            self.curves.look()
            await asyncio.sleep(max(LOOK_SECONDS, self.seconds / 5000))

    async def _store(self, server: Server) -> Any:
        connection = await Connection.open(server.port)
        connection.send("/v1/responses", {"input": "Once", "max_output_tokens": 4})
        await connection.head()
        return await connection.body()

    async def _fetch(self, server: Server, response: Any) -> Any:
        connection = await Connection.open(server.port)
        connection.send(f"/v1/responses/{response['id']}")
        await connection.head()
        return await connection.body()

    async def _idle(self) -> None:
        """Wait until the servers are idle: no request, no KV block in use, few descriptors."""
        until = time.monotonic() + IDLE_SECONDS
        for server in self.backends:
            while left := held(await server.text("/metrics")):
                if time.monotonic() > until:
                    self.tally.fault(f"{server.name} holds {left} after the last client")
                    break
                await asyncio.sleep(0.2)
        until = time.monotonic() + IDLE_SECONDS
        for server in self.servers:
            for role, pid in server.roles().items():
                while (num_open := len(os.listdir(f"/proc/{pid}/fd"))) > 60:
                    if time.monotonic() > until:
                        self.tally.fault(
                            f"{role} of {server.name} has {num_open} open descriptors after the last client"
                        )
                        break
                    await asyncio.sleep(0.2)
        self.curves.look()

    def _end(self) -> None:
        """End all servers, and look for things that are left."""
        for server in self.servers:
            pids, code = server.roles().values(), server.end()
            if code != 0:
                self.tally.fault(f"{server.name} ended with code {code}")
            time.sleep(0.2)
            if left := [pid for pid in pids if running(pid)]:
                self.tally.fault(f"processes {left} of {server.name} are left")
            if files := [path.name for path in server.folder.iterdir() if path.name != "stderr"]:
                self.tally.fault(f"{server.name} left {files}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", server.port)) == 0:
                    self.tally.fault(f"the port of {server.name} is taken")
            for line in (server.folder / "stderr").read_text(errors="replace").splitlines():
                if line.startswith("Traceback"):
                    self.tally.fault(f"{server.name} logged a traceback: see --json")
                    break
        if shared := [name for name in sorted(set(os.listdir("/dev/shm")) - self.shared) if not used(name)]:
            self.tally.fault(f"/dev/shm has {shared}")

    def report(self) -> int:
        """Print all numbers, and return the exit code."""
        tally = self.tally
        print(
            f"{self.args.streams} clients, {self.seconds / 60:g} minutes, steps of {self.args.step_ms:g} ms, seed "
            f"{self.args.seed}"
        )
        print("\nrequests: " + ", ".join(f"{name} {count:,}" for name, count in sorted(tally.ends.items())))
        print("connections in the proxy: " + ", ".join(f"{name} {count:,}" for name, count in self.proxied.items()))
        print("\nkilled            times   seconds until whole again: median, worst")
        for name, times in self.again.items():
            print(f"{name:17} {len(times):5}   {middle(times, 0.5):6.2f} {max(times):6.2f}")
        print("\nmilliseconds beyond the step    p50    p99   p99.9")
        for name, times in (("first token", "first"), ("next token", "gaps")):
            for when, found in (("calm", self.calm.get(times, [])), ("chaos", getattr(tally, times))):
                row = "".join(f"{1000 * middle(found, share):8.1f}" for share in (0.5, 0.99, 0.999))
                print(f"{name}, {when:13} {row}")
        print(
            "\nlast half of its life     seconds   memory MiB: first, last, KiB/h   descriptors, per h   threads, per h"
        )
        long = self.curves.long_lived(min(120.0, self.seconds / 3))
        for (server, role, _), curve in sorted(long.items()):
            grown, opened, begun = (slope(curve, field) for field in (1, 2, 3))
            first, last = curve[0], curve[-1]
            print(
                f"{f'{server} {role}':25} {last.seconds - first.seconds:7.0f} {first.kib / 1024:18.1f} "
                f"{last.kib / 1024:6.1f} {grown:7.0f} {last.descriptors:13} {opened:7.1f} {last.threads:8} {begun:7.1f}"
            )
            lived = last.seconds - first.seconds > self.seconds / 4  # its last half
            if lived and self.seconds >= LONG and grown > MOST_GROWTH and last.kib - first.kib > ONE_STEP:
                tally.fault(f"{role} of {server} grows by {grown:.0f} KiB an hour")
        if self.args.json is not None:
            curves = {" ".join(map(str, key)): curve for key, curve in self.curves.curves.items()}
            told = {"ends": tally.ends, "faults": tally.faults, "again": self.again, "curves": curves}
            logs = {one.name: (one.folder / "stderr").read_text(errors="replace")[-100_000:] for one in self.servers}
            self.args.json.write_text(json.dumps(told | {"logs": logs}))
        print("\n" + "\n".join(tally.faults or ["no fault"]))
        return int(bool(tally.faults))


def used(name: str) -> bool:
    """Return True if a process, perhaps somebody else's, has this file of /dev/shm in its memory."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


def held(metrics: str) -> dict[str, float]:
    """Return what an engine holds, by the text of its metrics; {}: nothing."""
    found: Counter[str] = Counter()
    for name in ("num_requests_running", "num_requests_waiting"):
        found[name] += sum(map(float, re.findall(rf"^quire:{name}{{.*}} (\S+)$", metrics, re.MULTILINE)))
    found["KV blocks"] += sum(map(float, re.findall(r'^quire:kv_blocks{.*"used".*} (\S+)$', metrics, re.MULTILINE)))
    return {name: count for name, count in found.items() if count}


def middle(times: list[float], share: float) -> float:
    """Return a quantile; 0 without values."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    sys.exit(main())

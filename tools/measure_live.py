"""Microseconds per step that the live view takes, on the mock executor: no model, no torch.

    python tools/measure_live.py [--steps N] [--json]
    python tools/measure_live.py --served [--rounds N] [--json]

256 requests run. The core's part is the calls of its recorder in a step, and frames with their encoding for another
process; ten watchers cost it no more than one, and none cost the question whether somebody watches. The HTTP process's
part is measured for a frame with 1 and 10 watchers: decoding, JSON, and the queues of the watchers. Times are those of
the thread, so that other work of the machine counts less.

`--served` measures a whole server instead: processor time of its core and of its HTTP process for each step, while 256
streams run and 0, 1 or 10 pages read the stream, or a reader that reads nothing. The cases take turns; medians.
"""

import argparse
import asyncio
import http.client
import json
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import measure_core
from measure_http import mock_server
from process_time import cpu_seconds
from quire.engine.core import EngineCore
from quire.entry.cli.table import format_table
from quire.entry.http.web.live_hub import LiveHub
from quire.procs.live_feed import INTERVAL, LEASE, SHARE, LiveFeed
from quire.procs.messages import FromCore
from quire.procs.wire import FROM_CORE, encode

RUNNING = 256
STEP_MS = 10.0  # of a GPU; a step of the mock takes no time
ABOUT = """\
Live view, 256 running requests. Microseconds of a thread: a step of the core with the mock, while nobody watches; the
recorder's calls in a watched step; a frame (its time limits the frames per second); calls and frames per step of 10 ms,
and their share of it; a frame in the HTTP process, by number of watchers (0: decoding alone). With churn four requests
come and go in every step.

"""


class _Watched:
    """A load (`measure_core`) whose core is watched, as one front end asks for frames; `frames` has them as bytes."""

    def __init__(self, case: measure_core.Case, per_frame: int) -> None:
        self.load = measure_core._Load(case)
        self.load.warm_up()
        self.frames: list[bytes] = []
        self.frame_us: list[float] = []
        self._now, self._per_frame, self._steps = 0.0, per_frame, 0
        self.feed = LiveFeed(self.load.core, self._send, lambda: self._now)
        self.feed.ask(0)
        self.frames.clear()

    def _send(self, message: FromCore) -> None:
        self.frames.append(encode(message))

    def after_step(self) -> None:
        """Make a frame after every `per_frame` steps."""
        self._steps += 1
        if self._steps % self._per_frame == 0:
            self._now += 10 * INTERVAL
            start = thread_time_ns()
            self.feed.ask(0)
            self.frame_us.append((thread_time_ns() - start) / 1000)


def _step(load: measure_core._Load) -> float:
    """Run a step; replace the requests that end. Return the microseconds of this thread, the mock's included."""
    start = thread_time_ns()
    outputs = load.core.step()
    encode(outputs)
    spent = thread_time_ns() - start
    load.front.apply(outputs)
    for _ in outputs.finished:
        request = load.new_request()
        start = thread_time_ns()
        load.core.add(request)
        spent += thread_time_ns() - start
    return spent / 1000


class _Hooks:
    """Clocks around the calls of a recorder. `spent`: nanoseconds, without those of the clocks themselves."""

    def __init__(self, core: EngineCore) -> None:
        recorder = core.recorder
        assert recorder is not None
        self.spent = self.calls = 0
        for name in ("arrived", "moved", "ended", "submitted", "confirmed"):
            setattr(recorder, name, self._timed(getattr(recorder, name)))
        core.scheduler.roster.on_move = [recorder.moved]
        core._finisher.on_end = [recorder.ended]
        empty = self._timed(lambda: None)
        for _ in range(1000):
            empty()
        self._clock = self.spent / self.calls
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.spent = self.calls = 0

    @property
    def microseconds(self) -> float:
        """The time of the calls."""
        return (self.spent - self.calls * self._clock) / 1000

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = thread_time_ns()
            call(*args)
            self.spent += thread_time_ns() - start
            self.calls += 1

        return timed


def measure(churn: bool, num_steps: int) -> dict[str, Any]:
    """Measure one case."""
    case = measure_core.Case(num_running=RUNNING, depth=2, churn=churn)
    per_frame = round(1000 * INTERVAL / STEP_MS)
    plain, watched = measure_core._Load(case), _Watched(case, per_frame)
    plain.warm_up()
    alone = [_step(plain) for _ in range(num_steps)]
    hooks = _Hooks(watched.load.core)
    for _ in range(num_steps):
        _step(watched.load)
        watched.after_step()
    frame = statistics.median(watched.frame_us)
    rate = min(1 / INTERVAL, 1e6 * SHARE / frame)
    step = hooks.microseconds / num_steps + frame * rate * STEP_MS / 1000
    return {
        "churn": "yes" if churn else "no",
        "step": round(statistics.median(alone), 1),
        "hooks": round(hooks.microseconds / num_steps, 1),
        "frame": round(frame),
        "frames/s": round(rate, 1),
        "per step": round(step, 1),
        "of 10 ms": f"{step / (10 * STEP_MS):.2f}%",
        "frame KB": round(statistics.median(map(len, watched.frames)) / 1000, 1),
        **{f"HTTP, {count}": round(asyncio.run(_delivered(watched.frames, count))) for count in (0, 1, 10)},
    }


async def _delivered(frames: list[bytes], count: int) -> float:
    """Return the microseconds that the HTTP process takes for a frame with `count` watchers; 0: decoding alone."""
    hub = LiveHub(lambda: None, lambda: [])
    readers = [hub.open("") for _ in range(count)]
    spent = []
    for data in frames:
        start = thread_time_ns()
        message: Any = FROM_CORE.decode(data)
        if readers:
            hub.take(message.frame)
            for reader in readers:
                await reader.next()
        spent.append((thread_time_ns() - start) / 1000)
    return statistics.median(spent)


def asking(num: int = 200_000) -> float:
    """Return the nanoseconds of the question whether somebody watches, which a step asks three times."""
    core = measure_core._Load(measure_core.Case(num_running=1, depth=1, churn=False)).core
    start = perf_counter_ns()
    for _ in range(num):
        if core.recorder is not None:
            raise AssertionError
    return 3 * (perf_counter_ns() - start) / num


class _Sockets:
    """Connections that are read by a thread and thrown away; those that are `silent` are not read.

    ended   True: an answer has come to its end
    """

    def __init__(self, port: int) -> None:
        self._port, self._selector, self.ended = port, selectors.DefaultSelector(), False
        self._selector.register(socket.socketpair()[0], selectors.EVENT_READ)  # there is always one
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ask(self, request: bytes, *, silent: bool = False) -> socket.socket:
        """Send a request over a new connection."""
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(request)
        if not silent:
            self._selector.register(connection, selectors.EVENT_READ)
        return connection

    def leave(self, connection: socket.socket) -> None:
        """Close a connection."""
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                try:
                    self.ended |= key.fileobj.recv(1 << 18).endswith(LAST)  # type: ignore[union-attr]
                except OSError:
                    pass  # it was left


LAST = b"\r\n0\r\n\r\n"  # the last chunk of an answer
SERVED_STEP_MS, SERVED_TOKENS, SERVED_SECONDS = 50.0, 3900, 4.0
SERVED = {"none": 0, "1 page": 1, "10 pages": 10, "1 that reads nothing": -1}  # readers of the stream


def served(rounds: int) -> list[dict[str, Any]]:
    """Measure a server with 256 streams and every case of `SERVED`, in turn."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SERVED}
    with mock_server(SERVED_STEP_MS, 1, "--max-num-seqs", str(RUNNING), "--num-blocks", "40000") as server:
        (core,) = _children(server.pid)
        sockets = _Sockets(server.port)
        body = json.dumps({"prompt": "a", "max_tokens": SERVED_TOKENS, "ignore_eos": True, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(RUNNING):
            sockets.ask(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(5)
        for _ in range(rounds):
            for name, readers in SERVED.items():
                with ExitStack() as stack:
                    for _ in range(abs(readers)):
                        asked = b"GET /debug/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
                        stack.callback(sockets.leave, sockets.ask(asked, silent=readers < 0))
                    time.sleep(1)
                    before = _counted(server.pid, core, server.port)
                    time.sleep(SERVED_SECONDS)
                    after = _counted(server.pid, core, server.port)
                steps = after[2] - before[2]
                spent = [1e6 * (b - a) / steps for a, b in zip(before[:2], after[:2], strict=True)]
                found[name].append((spent[0], spent[1], after[3] / 1e6))
                time.sleep(LEASE + 0.5)  # the core goes on recording for a while
    if sockets.ended:
        raise SystemExit("streams ended before the last case: take fewer rounds.")
    rows = []
    for name, runs in found.items():
        http, core_us, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        plain = statistics.median(run[1] for run in found["none"])
        share = f"{(core_us - plain) / (10 * SERVED_STEP_MS):.2f}%"
        rows.append({"readers": name, "core us": round(core_us), "of a step": share, "HTTP us": round(http)})
        rows[-1] |= {"HTTP MB": round(memory), "runs": [round(run[1]) for run in runs]}
    return rows


def _counted(pid: int, core: int, port: int) -> tuple[float, float, float, float]:
    """Return processor seconds of the HTTP process and of the core, steps so far, and bytes of the HTTP process."""
    spent = [cpu_seconds(each) or 0.0 for each in (pid, core)]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    (steps,) = (float(line.split()[-1]) for line in lines if line.startswith("quire:steps_total"))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return spent[0], spent[1], steps, 4096.0 * pages


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    """Measure both cases, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=ABOUT)
    parser.add_argument("--steps", type=int, default=measure_core.MAX_STEPS, choices=range(20, 401), metavar="N")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--served", action="store_true", help="measure a whole server")
    parser.add_argument(
        "--rounds", type=int, default=4, metavar="N", help="of --served: turns of each case (default: 4)"
    )
    args = parser.parse_args()
    if args.served:
        cases = served(args.rounds)
        cells = [list(map(str, one.values())) for one in cases]
        print(json.dumps(cases, indent=1) if args.json else format_table(list(cases[0]), cells))
        return
    rows, nobody = [measure(churn, args.steps) for churn in (False, True)], round(asking())
    if args.json:
        print(json.dumps({"unit": "microseconds", "nobody_ns": nobody, "rows": rows}, indent=1))
        return
    print(ABOUT + format_table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"\nWhile nobody watches: {nobody} ns per step, to ask so.")


if __name__ == "__main__":
    main()

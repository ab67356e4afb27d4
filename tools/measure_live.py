"""Microseconds per step that the live view takes, on the mock executor: no model, no torch.

    python tools/measure_live.py [--steps N] [--json]

256 requests run. The core's part is the calls of its recorder in a step, and frames with their encoding for another
process; ten watchers cost it no more than one, and none cost the question whether somebody watches. The HTTP process's
part is measured for a frame with 1 and 10 watchers: decoding, JSON, and the queues of the watchers. Times are those of
the thread, so that other work of the machine counts less.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import Any

import measure_core
from quire.engine.core import EngineCore
from quire.entry.cli.table import format_table
from quire.entry.http.web.live_hub import LiveHub
from quire.procs.live_feed import INTERVAL, SHARE, LiveFeed
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


def main() -> None:
    """Measure both cases, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=ABOUT)
    parser.add_argument("--steps", type=int, default=measure_core.MAX_STEPS, choices=range(20, 401), metavar="N")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows, nobody = [measure(churn, args.steps) for churn in (False, True)], round(asking())
    if args.json:
        print(json.dumps({"unit": "microseconds", "nobody_ns": nobody, "rows": rows}, indent=1))
        return
    print(ABOUT + format_table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"\nWhile nobody watches: {nobody} ns per step, to ask so.")


if __name__ == "__main__":
    main()

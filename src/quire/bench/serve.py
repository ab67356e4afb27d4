"""Load on a running server, and its result: latencies, throughput, goodput, errors by kind.

The result has the names of `vllm bench serve`, so that tools for its files can read ours.
"""

import asyncio
import math
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from quire.bench.serve_client import Client, Record
from quire.bench.serve_load import Ask, arrivals
from quire.contracts.errors import ConfigError

LATENCIES = ("ttft", "tpot", "itl", "e2el")
MAX_SAID = 3  # different error messages kept in the result
BUSY = 0.8  # CPU share of the client above which it may be the bottleneck


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pace of the requests.

    rate              requests per second; inf: all at once
    burstiness        1: a Poisson process; below 1: in bursts; above 1: more even (see `arrivals`)
    max_concurrency   largest number of requests at once; None: no limit
    seed              seed of the random arrival times
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0


@dataclass(kw_only=True)
class LoadRun:
    """Records of the finished requests of a run, with its wall time and the CPU time of the client, in seconds.

    Requests that Ctrl-C cut off have no record; `interrupted` is then True.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    interrupted: bool = False


async def drive(client: Client, asks: Sequence[Ask], pace: Pace, on_end: Callable[[], None] = lambda: None) -> LoadRun:
    """Send every request at its arrival time and wait for all. Return their records.

    on_end   called after each finished request

    Ctrl-C ends the run early; the records of finished requests are returned.
    """
    run, stop = LoadRun(), asyncio.Event()
    gate = asyncio.Semaphore(pace.max_concurrency or len(asks) or 1)
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError):  # a loop without signal support; Ctrl-C then ends the program
        loop.add_signal_handler(signal.SIGINT, stop.set)
    began, cpu = perf_counter(), time.process_time()

    async def one(ask: Ask, late: float) -> None:
        async with gate:
            run.records.append(await client.send(ask, late))
            on_end()

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for ask, due in zip(asks, arrivals(len(asks), pace.rate, pace.burstiness, pace.seed), strict=True):
                wait = began + due - perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(ask, max(0.0, perf_counter() - began - due)))

    work, stopped = asyncio.ensure_future(all_of_them()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        run.interrupted = not work.done()
    finally:
        stopped.cancel()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        with suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
    run.seconds, run.cpu_seconds = perf_counter() - began, time.process_time() - cpu
    return run


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse pairs like "ttft:200" to {name: milliseconds}. Raises `ConfigError` for a pair of another form.

    The names are ttft, tpot and e2el; "e2e" also means e2el.
    """
    bounds = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        name = {"e2e": "e2el"}.get(name, name)
        if name not in ("ttft", "tpot", "e2el") or not colon or not value.replace(".", "", 1).isdigit():
            raise ConfigError(f"--goodput {pair}: must be ttft:MS, tpot:MS or e2e:MS.")
        bounds[name] = float(value)
    return bounds


def summarize(run: LoadRun, percentiles: Sequence[float], goodput: dict[str, float]) -> dict[str, Any]:
    """Return the result of a run: counts, rates per second, latencies in milliseconds, CPU use of the client."""
    done = [record for record in run.records if record.error is None]
    seconds, num_events = max(run.seconds, 1e-9), sum(record.num_events for record in run.records)
    num_input, num_output = sum(r.num_input for r in done), sum(r.num_output for r in done)
    result: dict[str, Any] = {
        "duration": round(run.seconds, 4),
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "errors": dict(Counter(record.error for record in run.records if record.error is not None)),
        "said": list(dict.fromkeys(record.said for record in run.records if record.said))[:MAX_SAID],
        "interrupted": run.interrupted,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "tokens_counted_by": "server" if all(record.counted for record in done) else "events",
        "request_throughput": round(len(done) / seconds, 3),
        "output_throughput": round(num_output / seconds, 2),
        "total_token_throughput": round((num_input + num_output) / seconds, 2),
        "tokens_per_event": round(num_output / max(1, sum(r.num_events for r in done)), 2),
    }
    latencies = {name: [_latency(record, name) for record in done] for name in ("ttft", "tpot", "e2el")}
    if goodput:
        met = [all((latencies[name][i] or 0.0) <= bound for name, bound in goodput.items()) for i in range(len(done))]
        result |= {"goodput_bounds_ms": goodput, "request_goodput": round(sum(met) / seconds, 3)}
    latencies["itl"] = [1000 * gap for record in done for gap in record.gaps]
    for name in LATENCIES:
        result |= _describe(name, [value for value in latencies[name] if value is not None], percentiles)
    return result | {
        "max_send_delay_ms": round(1000 * max((record.late for record in run.records), default=0.0), 2),
        "client_cpu_share": round(run.cpu_seconds / seconds, 3),
        "client_cpu_us_per_event": round(1e6 * run.cpu_seconds / max(1, num_events), 1),
    }


def _latency(record: Record, name: str) -> float | None:
    """Return a latency of a request in milliseconds; None if it has no such time."""
    if name == "e2el":
        return 1000 * (record.ended - record.started)
    if record.first is None:
        return None
    if name == "ttft":
        return 1000 * (record.first - record.started)
    return 1000 * (record.ended - record.first) / (record.num_output - 1) if record.num_output > 1 else None


def _describe(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        f"mean_{name}_ms": round(statistics.fmean(values), 3) if values else None,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": round(statistics.pstdev(values), 3) if values else None,
    }
    return row | {f"p{p:g}_{name}_ms": percentile(values, p) for p in percentiles}


def percentile(values: Sequence[float], p: float) -> float | None:
    """Return the p-th percentile (0 to 100), linear between neighbours; None without values."""
    return round(float(np.percentile(values, p)), 3) if values else None


def remarks(result: dict[str, Any], asks: Sequence[Ask]) -> list[str]:
    """Return notes that a reader of the result needs to interpret it."""
    lines = [f"a request failed: {sentence}" for sentence in result["said"]]
    if result["tokens_counted_by"] == "events":
        lines.append("the server sent no usage: output tokens are events, input tokens are unknown.")
    if result["tokens_per_event"] > 1.05:
        lines.append(f"events carry {result['tokens_per_event']} tokens: ITL is the time between events.")
    asked = statistics.fmean(ask.max_tokens for ask in asks) if asks else 0.0
    if result["completed"] and result["total_output_tokens"] / result["completed"] < 0.95 * asked:
        lines.append("answers are shorter than their max_tokens: --ignore-eos makes them full length.")
    if result["client_cpu_share"] > BUSY:
        lines.append(f"this client used {result['client_cpu_share']:.0%} of a core: it may be the bottleneck.")
    return lines

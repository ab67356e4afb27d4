"""Cost of HTTP: the processor time of the server's HTTP process per streamed event, and the delay that it adds.

    python tools/measure_http.py [--seconds X] [--streams 64] [--intervals 8] [--json]

A real `quire serve --device mock` runs as a child, so that nothing but HTTP, the front end and the process hop is
measured; a client in a third process reads the streams.
"""

import argparse
import http.client
import json
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from process_time import cpu_seconds
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import EngineDead
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.engine.mock_core import build_mock_core
from quire.entry.cli.table import format_table
from quire.entry.front_end import FrontEnd
from quire.entry.prompts import Prompt
from quire.text.load import load_text

PROMPT = "The cat sat on the mat and looked at the rain. " * 4
START_TIMEOUT, STOP_TIMEOUT = 60.0, 15.0
FIRST_REPEAT = 200
CLIENT = Path(__file__).with_name("measure_http_client.py")
ABOUT = """\
Processor time (user and system) of the HTTP process, in microseconds per streamed event and per token, with events of
one token and coalesced ones; then milliseconds to the first token of a single request, through HTTP and straight from
a core in this process.

"""
COLUMNS = {
    "streams": "streams",
    "stream_interval": "tokens/event",
    "step_ms": "step, ms",
    "events": "events",
    "events_per_s": "events/s",
    "http_cpu_us_per_event": "us/event",
    "http_cpu_us_per_token": "us/token",
    "client_cpu_us_per_event": "client us/event",
    "ttft_median_ms": "TTFT p50, ms",
    "ttft_max_ms": "max, ms",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement: number of streams at once, tokens of an event, time of a step."""

    streams: int
    interval: int
    step_ms: float


# Steps as long as leave the HTTP process idle most of the time: what counts is time per event, not how many fit.
CASES = tuple(
    Case(streams=streams, interval=interval, step_ms=step_ms)
    for interval in (1, 8)
    for streams, step_ms in ((1, 2.0), (64, 10.0), (256, 25.0))
)


@dataclass(kw_only=True)
class Server:
    """A running `quire serve`: `pid` is the HTTP process."""

    pid: int
    port: int


@contextmanager
def mock_server(step_ms: float, interval: int, *flags: str) -> Iterator[Server]:
    """A server on the mock core for the time of a `with`; raises `EngineDead` with its last line if it cannot start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        sys.executable,
        "-P",
        "-m",
        "quire",
        "serve",
        "--device",
        "mock",
        "--mock-step-ms",
        str(step_ms),
        "--stream-interval",
        str(interval),
        "--port",
        str(port),
        "--disable-log-stats",
        *flags,
    ]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            if not _wait_until_ready(process, port, tls="--ssl-certfile" in flags):
                output.seek(0)
                reason = (output.read().strip().splitlines() or ["no output"])[-1]
                raise EngineDead(f"the measured server did not start: {reason}")
            yield Server(pid=process.pid, port=port)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, tls: bool) -> bool:
    kind = (
        partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
        if tls
        else http.client.HTTPConnection
    )
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        connection = kind("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(0.02)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure_case(case: Case, seconds: float) -> dict[str, Any]:
    """Run one case for about `seconds`: processor time per event and per token, and times to the first token."""
    num_tokens = max(16, min(2000, round(1000 * seconds / case.step_ms)))
    with mock_server(case.step_ms, case.interval, "--max-num-seqs", str(max(case.streams, 2))) as server:
        _drive(server, streams=1, repeat=4, num_tokens=4)  # what only a first request pays
        done = _drive(server, streams=case.streams, repeat=1, num_tokens=num_tokens)
    expected = case.streams * num_tokens
    if done["tokens"] != expected:
        raise EngineDead(f"{done['tokens']} tokens came instead of {expected}: this run measures nothing.")
    per_event = 1e6 * done["steady_server_cpu_s"] / max(1, done["steady_events"])
    return {
        "streams": case.streams,
        "stream_interval": case.interval,
        "step_ms": case.step_ms,
        "tokens": done["tokens"],
        "events": done["events"],
        "http_cpu_us_per_event": round(per_event, 1),
        "http_cpu_us_per_token": round(per_event * done["events"] / done["tokens"], 1),
        "client_cpu_us_per_event": round(1e6 * done["cpu_s"] / done["events"], 1),
        "events_per_s": round(done["events"] / done["seconds"]),
        "ttft_median_ms": _ms(statistics.median(done["first_s"])),
        "ttft_max_ms": _ms(done["first_s"][-1]),
    }


def measure_first_token(repeat: int = FIRST_REPEAT) -> dict[str, Any]:
    """The time to a first token at batch 1 through HTTP and straight from a core in this process, in milliseconds;
    and the processor time of a whole short request."""
    with mock_server(0.0, 1) as server:
        _drive(server, streams=1, repeat=20, num_tokens=1)
        before = _cpu_seconds(server)
        through = _drive(server, streams=1, repeat=repeat, num_tokens=1)
        used = _cpu_seconds(server) - before
    direct = _direct_first_tokens(repeat)
    median = statistics.median(through["first_s"])
    return {
        "ttft_http_ms": _ms(median),
        "ttft_http_p99_ms": _ms(through["first_s"][len(through["first_s"]) * 99 // 100]),
        "ttft_direct_ms": _ms(statistics.median(direct)),
        "ttft_added_ms": _ms(median - statistics.median(direct)),
        "http_cpu_us_per_request": round(1e6 * used / repeat),
    }


def _direct_first_tokens(repeat: int) -> list[float]:
    """Seconds from a text to its first output, without any other process."""
    config = EngineConfig.from_flat(device="mock", mock_step_ms=0.0)
    core, text = build_mock_core(config, bundled_model()), load_text(config, bundled_model())
    front = FrontEnd.of(config, core.facts, text.tokenizer, text.eos_ids)
    params = SamplingParams(max_tokens=1, ignore_eos=True, output_kind=OutputKind.DELTA)
    times = []
    for _ in range(repeat + 20):
        started = time.perf_counter()
        _, requests = front.start(Prompt(text=PROMPT), params)
        core.add(requests[0])
        while not front.apply(core.step())[0]:
            pass
        times.append(time.perf_counter() - started)
    return times[20:]


def _drive(server: Server, *, streams: int, repeat: int, num_tokens: int) -> dict[str, Any]:
    body = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    task = {
        "port": server.port,
        "path": "/v1/completions",
        "body": body,
        "streams": streams,
        "repeat": repeat,
        "pid": server.pid,
    }
    done = subprocess.run(
        [sys.executable, str(CLIENT)], input=json.dumps(task), text=True, stdout=subprocess.PIPE, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    if "error" in result:
        raise EngineDead(f"the measured server failed: {result['error']}")
    return result


def _cpu_seconds(server: Server) -> float:
    used = cpu_seconds(server.pid)
    if used is None:
        raise EngineDead("processor time of another process is known only where there is /proc.")
    return used


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def main() -> None:
    """Measure the chosen cases and the first token, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=ABOUT)
    parser.add_argument("--seconds", type=float, default=4.0, metavar="X", help="length of a run (default: 4)")
    parser.add_argument("--streams", type=int, nargs="*", help="only these numbers of streams, of 1 64 256")
    parser.add_argument("--intervals", type=int, nargs="*", help="only these tokens per event, of 1 8")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    result: dict[str, Any] = {"rows": []}
    for case in CASES:
        if case.streams in (args.streams or [case.streams]) and case.interval in (args.intervals or [case.interval]):
            print(f"{case.streams} streams, {case.interval} tokens per event", file=sys.stderr)
            result["rows"].append(measure_case(case, args.seconds))
    result["first_token"] = measure_first_token()
    print(json.dumps(result, indent=1) if args.json else _report(result))


def _report(result: dict[str, Any]) -> str:
    rows = [[row[name] for name in COLUMNS] for row in result["rows"]]
    first = [(name.replace("_", " "), value) for name, value in result["first_token"].items()]
    parts = [format_table(list(COLUMNS.values()), rows)] if rows else []
    return ABOUT + "\n\n".join([*parts, format_table(("first token", "value"), first)])


if __name__ == "__main__":
    main()

"""Cost of spans to a server: processor time of its HTTP process per event and per request, and of its core per step.

    python tools/measure_spans.py [--rounds 3] [--streams 64] [--tokens 200] [--requests 400] [--json]

Cases: no collector; 1% and 100% of the requests traced; 100% with a collector that never answers. A real
`quire serve --device mock` runs for each case, in turn; medians over the rounds. "span us" is the time of the event
loop's thread from the beginning to the end of a request's span, measured alone, in this process. Needs the extra
`otel`.
"""

import argparse
import json
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from measure_http import Server, _cpu_seconds, _drive, mock_server
from process_time import cpu_seconds
from quire.config.serve import TracingConfig
from quire.entry.cli.table import format_table
from quire.observe.series import Tally
from quire.observe.tracing import open_tracer

CASES = {"off": None, "1%": 0.01, "100%": 1.0, "100%, mute collector": 1.0}  # name -> share of requests
COLUMNS = ("span us", "http us/event", "http us/request", "core us/step", "exported", "dropped")
SAMPLE = re.compile(r"^quire:(\w+)(?:{(.*)})? (\S+)$", re.MULTILINE)


@contextmanager
def collector(mute: bool) -> Iterator[str]:
    """A collector that takes spans and drops them, or one that never answers; its URL."""
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if mute:
                done.wait()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        done.set()
        server.shutdown()


def metrics(server: Server) -> dict[str, float]:
    """The samples of a server: name, or name and the label `result`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        found = {}
        for name, labels, value in SAMPLE.findall(answer.read().decode()):
            result = re.search(r'result="(\w+)"', labels)
            found[f"{name} {result[1]}" if result else name] = float(value)
        return found


def span_us(rate: float | None, url: str, count: int = 2_000) -> float:
    """Microseconds of this thread for a span with as many attributes as that of a completion."""
    tracer = open_tracer(TracingConfig(otlp_traces_endpoint=url, otlp_traces_sample_rate=rate), Tally())
    if rate is None or tracer is None:
        return 0.0
    first = {"http.request.method": "POST", "http.route": "/v1/completions", "gen_ai.operation.name": "text_completion"}
    last = {f"gen_ai.attribute.{number}": 0.1 * number for number in range(20)}
    start = time.thread_time_ns()
    for _ in range(count):
        span = tracer.begin("text_completion", [], first)
        if span.records:
            for event in ("scheduled", "first_token"):
                span.event(event, time.monotonic())
        span.end(200, last)
    spent = time.thread_time_ns() - start
    tracer.close()
    return spent / count / 1000


def measure(name: str, streams: int, tokens: int, requests: int) -> dict[str, float]:
    """Measure a case once."""
    rate = CASES[name]
    with collector("mute" in name) as url:
        flags = [] if rate is None else ["--otlp-traces-endpoint", url, "--otlp-traces-sample-rate", str(rate)]
        alone = span_us(rate, url)
        with mock_server(10.0, 1, "--max-num-seqs", str(max(streams, 2)), *flags) as server:
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            core = int(children[0])
            _drive(server, streams=1, repeat=4, num_tokens=4)
            before, steps = cpu_seconds(core), metrics(server)["steps_total"]
            done = _drive(server, streams=streams, repeat=1, num_tokens=tokens)
            after, steps = cpu_seconds(core), metrics(server)["steps_total"] - steps
            assert before is not None and after is not None
            used = _cpu_seconds(server)
            _drive(server, streams=8, repeat=requests // 8, num_tokens=1)
            used = _cpu_seconds(server) - used
            told = metrics(server)
    return {
        "span us": alone,
        "http us/event": 1e6 * done["steady_server_cpu_s"] / max(1, done["steady_events"]),
        "http us/request": 1e6 * used / (requests // 8 * 8),
        "core us/step": 1e6 * (after - before) / steps,
        "exported": told.get("trace_spans_total exported", 0.0),
        "dropped": told.get("trace_spans_total dropped", 0.0),
    }


def main() -> None:
    """Measure the cases in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64, help="streams at once, for events and steps")
    parser.add_argument("--tokens", type=int, default=200, help="events of each")
    parser.add_argument("--requests", type=int, default=400, help="requests of one token, eight at once")
    parser.add_argument("--json", action="store_true", help="print every round as JSON")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    names = [*CASES]
    for first in range(args.rounds):
        for name in names[first % len(names) :] + names[: first % len(names)]:  # each case is first once
            found[name].append(measure(name, args.streams, args.tokens, args.requests))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    rows = [
        [name, *(round(statistics.median(one[c] for one in runs), 1) for c in COLUMNS)] for name, runs in found.items()
    ]
    print(format_table(["traced", *COLUMNS], rows))


if __name__ == "__main__":
    main()

"""`quire bench http`: starts servers on the mock core and measures what HTTP costs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from quire.config.flags import FlagParser
from quire.contracts.errors import ConfigError
from quire.entry.cli.table import format_table
from quire.entry.leaving import raise_on_interrupt

ABOUT = """\
Processor time (user and system) of the HTTP process, in microseconds per streamed event and per token, with events of
one token and coalesced ones; then milliseconds to the first token of a single request, through HTTP and straight from
a core in this process.

"""
COLUMNS = {
    "streams": "streams", "stream_interval": "tokens/event", "step_ms": "step, ms", "events": "events",
    "events_per_s": "events/s", "http_cpu_us_per_event": "us/event", "http_cpu_us_per_token": "us/token",
    "client_cpu_us_per_event": "client us/event", "ttft_median_ms": "TTFT p50, ms", "ttft_max_ms": "max, ms",
}


def configure(parser: FlagParser) -> None:
    """Add the flags."""
    parser.add_argument("--seconds", type=float, default=4.0, metavar="X", help="length of a run (default: 4)")
    parser.add_argument("--streams", metavar="NUMBERS", help="only these numbers of streams, of 1,64,256")
    parser.add_argument("--intervals", metavar="NUMBERS", help="only these tokens per event, of 1,8")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON."""
    from quire.bench.http import CASES, measure_case, measure_first_token

    raise_on_interrupt()  # processes are started
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds}: must be above 0.")
    streams = _chosen("--streams", args.streams, {case.streams for case in CASES})
    intervals = _chosen("--intervals", args.intervals, {case.interval for case in CASES})
    result: dict[str, Any] = {"rows": [], "first_token": {}}
    for case in CASES:
        if case.streams in streams and case.interval in intervals:
            print(f"{case.streams} streams, {case.interval} tokens per event", file=sys.stderr)
            result["rows"].append(measure_case(case, args.seconds))
    result["first_token"] = measure_first_token()
    if args.out is not None:
        _write(args.out, result)
    print(json.dumps(result, indent=1) if args.json else _report(result))
    return 0


def _chosen(flag: str, text: str | None, known: set[int]) -> set[int]:
    if text is None:
        return known
    chosen = {int(part) for part in text.split(",") if part.isdigit()}
    if not chosen or not chosen <= known:
        raise ConfigError(f"{flag} {text}: must be among {', '.join(map(str, sorted(known)))}.")
    return chosen


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}.") from None


def _report(result: dict[str, Any]) -> str:
    rows = [[row[name] for name in COLUMNS] for row in result["rows"]]
    first = [(name.replace("_", " "), value) for name, value in result["first_token"].items()]
    parts = [format_table(list(COLUMNS.values()), rows)] if rows else []
    return ABOUT + "\n\n".join([*parts, format_table(("first token", "value"), first)])

"""`quire bench`: measures start-up, single requests, batches, kernels and servers."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config, given_options
from quire.contracts.errors import ConfigError
from quire.entry.cli import bench_kernels, bench_serve
from quire.entry.cli.one_device import check_one_device
from quire.entry.cli.table import format_table, print_result, write_json
from quire.entry.exit_codes import DONE, FAILED
from quire.entry.installed import check_torch
from quire.entry.keyboard_interrupt import raise_on_interrupt
from quire.observe.progress import Progress
from quire.platforms.detect import resolve_device

if TYPE_CHECKING:
    from quire.bench.offline import OfflineBench
    from quire.bench.workload import Workload

SUMMARY = "measure: latency, throughput, profile, startup, serve, kernels"
KINDS = {
    "latency": "one request at a time: first token, inter-token time",
    "throughput": "batches of requests: tokens per second",
    "profile": "GPU time of a workload, by kernel and between steps",
    "startup": "process start to first token, by phase",
    "serve": "load on a running server: latencies, throughput, goodput",
    "kernels": "time of every kernel, against its floor (bytes / bandwidth) and the library it replaces",
}
LENGTHS = (
    "the workloads have lengths of their own: --only chooses workloads, --max-len shortens them; `quire bench serve "
    "--input-len N --output-len N` measures a server with any lengths"
)
COUNTS = "the workloads have sizes of their own: --scale changes the number of requests, --only chooses workloads"
ELSEWHERE = {  # vLLM's flags that these measurements lack
    **dict.fromkeys(("--input-len", "--output-len", "--random-input-len", "--random-output-len"), LENGTHS),
    **dict.fromkeys(("--batch-size", "--num-prompts"), COUNTS),
    **dict.fromkeys(("--num-iters", "--num-iters-warmup"), "--repeat N runs the workloads N times, the fastest counts"),
}
OWN_FLAGS: dict[str, Any] = {"serve": bench_serve, "kernels": bench_kernels}
MOST_REQUESTS = 256  # of a profiled workload without --scale: a thousand requests launch a million kernels
KERNELS_SHOWN, KERNEL_WIDTH = 25, 60  # in a table; the JSON has all
MODEL_HELP = """\
MODEL is the name of a bundled configuration (random weights, no tokenizer), or a folder or hub id.
"""


def configure(parser: FlagParser) -> None:
    """Add one subcommand of `quire bench` per kind of measurement, with its flags."""
    from quire.bench.workload import DEFAULT_MODEL

    kinds = parser.add_subparsers(
        prog="quire bench", dest="kind", metavar="KIND", required=True, title="kinds", parser_class=FlagParser
    )
    for name, summary in KINDS.items():
        model = "" if name in OWN_FLAGS else " [MODEL]"
        kind = kinds.add_parser(
            name,
            help=summary,
            usage=f"quire bench {name}{model} [flags]",
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{MODEL_HELP if model else ''}",
        )
        kind.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback on error")
        kind.add_argument("--json", action="store_true", help="print JSON instead of a table")
        kind.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to this file")
        if name in OWN_FLAGS:
            OWN_FLAGS[name].configure(kind)
            continue
        kind.elsewhere = ELSEWHERE
        if name != "profile":
            kind.add_argument(
                "--against",
                type=Path,
                metavar="FILE",
                help="compare with a stored result (of --out), and fail when it is more than 5%% slower",
            )
            kind.add_argument(
                "--repeat",
                type=_positive,
                default=2 if name != "startup" else 3,
                metavar="N",
                help="number of runs; the fastest is reported (default: %(default)s)",
            )
        if name != "startup":
            kind.add_argument("--only", metavar="NAMES", help="workloads, separated by commas")
            most = f" (default: 1, and at most {MOST_REQUESTS} requests)" if name == "profile" else ""
            kind.add_argument("--scale", type=float, metavar="X", help=f"factor on the number of requests{most}")
            kind.add_argument("--max-len", type=_positive, metavar="N", help="maximum prompt and output length")
        add_model_argument(kind, DEFAULT_MODEL)
        add_engine_flags(kind)


def run(args: argparse.Namespace) -> int:
    """Run `quire bench`: measure, and print a table or JSON. Return the exit code."""
    if args.kind in OWN_FLAGS:
        code: int = OWN_FLAGS[args.kind].run(args)
        return code
    stored = None
    if (against := getattr(args, "against", None)) is not None:
        from quire.bench.against import read_stored

        stored = read_stored(against)  # before anything is measured
    result = {"profile": _profile, "startup": _startup}.get(args.kind, _workloads)(args)
    return DONE if stored is None else _compare(result, stored)


def _compare(result: dict[str, Any], stored: dict[str, Any]) -> int:
    """Print a comparison with a stored result; returns the exit code."""
    from quire.bench.against import compare_results

    found = compare_results(result, stored)
    rows = [[one.name, one.stored, one.now, f"{one.ratio:.3f}", "slower" * one.slower] for one in found]
    print("\n" + format_table(("workload", "stored s", "now s", "speed", ""), rows), file=sys.stderr)
    return FAILED if any(one.slower for one in found) else DONE


def _make_bench(args: argparse.Namespace) -> "tuple[OfflineBench, list[Workload]]":
    """Make the engine, and read the workloads that the flags select."""
    from quire.bench.offline import LATENCY_WORKLOAD, OfflineBench
    from quire.bench.workload import load_workloads

    scale = 1.0 if args.scale is None else args.scale
    if scale <= 0:
        raise ConfigError(f"--scale {scale}: must be above 0.")
    only = args.only or {"latency": LATENCY_WORKLOAD, "profile": "decode_b64"}.get(args.kind)
    works = list(load_workloads(only.split(",") if only else (), scale, args.max_len))
    engine_config(args)
    with Progress("Loading the model", 0, enabled=True, unit=""):
        bench = OfflineBench(given_options(args))
    raise_on_interrupt()
    return bench, works


def _workloads(args: argparse.Namespace) -> dict[str, Any]:
    bench, works = _make_bench(args)
    alone = args.kind == "latency"
    total = args.repeat * sum(sum(work.outputs[:1] if alone else work.outputs) for work in works)
    with bench.llm, Progress("Measuring", total, enabled=True, unit="tokens", rate=1) as progress:
        bench.advance, measure = progress.advance, bench.latency if alone else bench.throughput
        for row in measure(works, args.repeat):
            print(f"{row['workload']}: {row['seconds']} s", file=sys.stderr)
            write_json(args.out, bench.result)  # after each workload, so that a crash loses no result
    print_result(args, bench.result, _workload_table)
    return bench.result


def _workload_table(result: dict[str, Any]) -> str:
    rows = result["runs"]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = format_table([c.replace("_", " ") for c in columns], [[row.get(c, "") for c in columns] for row in rows])
    return (
        f"{result['engine']}, {result['model']} on {result['device']}: import {result['import_s']} s, construct "
        f"{result['construct_s']} s\n\n{table}"
    )


def _profile(args: argparse.Namespace) -> NoReturn:
    from quire.bench.profile import profile_workload

    config = engine_config(args)
    check_one_device(config.parallel, "quire bench profile")
    if resolve_device(config.device.device).device != "cuda":
        raise ConfigError(
            "`quire bench profile` measures GPU kernels, and this would run on the CPU: use a GPU, or "
            "`quire bench kernels`."
        )
    bench, works = _make_bench(args)
    with bench.llm:
        most = None if args.scale else MOST_REQUESTS
        works = [replace(work, prompts=work.prompts[:most], outputs=work.outputs[:most]) for work in works]
        result = bench.result | {"runs": [profile_workload(bench, work) for work in works]}
    print_result(args, result, lambda result: "\n\n".join(map(_profile_table, result["runs"])))
    sys.stdout.flush()
    os._exit(0)  # a normal exit after a profile sometimes aborts: libraries free memory that is not theirs


def _profile_table(row: dict[str, Any]) -> str:
    steps = row["steps"] or {}
    lines = [
        f"{row['workload']}: {row['seconds']} s for {row['requests']} requests; the GPU was idle for "
        f"{row['idle']['total_ms']} ms ({row['idle']['share']:.1%})"
    ]
    if steps:
        lines.append(
            f"{steps['count']} steps of {steps['launches']} launches, {steps['us_p50']} us each (median); "
            f"gap between steps {steps['gap_us_p50']} us (median), {steps['gap_us_p99']} us (p99)"
        )
    cells = [
        [k["kernel"][:KERNEL_WIDTH], k["calls"], f"{k['total_ms']:.2f}", f"{k['share']:.1%}", k["us"]]
        for k in row["kernels"][:KERNELS_SHOWN]
    ]
    return "\n".join(lines) + "\n\n" + format_table(("kernel", "calls", "total ms", "share", "us each"), cells)


def _startup(args: argparse.Namespace) -> dict[str, Any]:
    engine_config(args)
    from quire.bench.startup import measure_startup

    check_torch()
    raise_on_interrupt()  # before processes are started, which an exception must end
    with Progress("Starting", args.repeat, enabled=True, unit="runs", rate=1) as progress:
        found = measure_startup(given_options(args), args.repeat, lambda: progress.advance(1))
    print_result(
        args,
        found,
        lambda result: (
            f"{result['model']}, fastest of {len(result['totals'])}: {' '.join(map(str, result['totals']))} s\n\n"
            + format_table(("phase", "seconds"), [(name, f"{s:.3f}") for name, s in result["phases"].items()])
        ),
    )
    return found


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)

"""`quire bench kernels`: the time of every kernel, beside its floor and the library it replaces."""

import argparse
import sys
from pathlib import Path
from typing import Any

from quire.config.flags import FlagParser, add_flag_table
from quire.contracts.errors import ConfigError
from quire.entry.cli.table import format_table, print_result
from quire.platforms.detect import resolve_device

COLUMNS = {
    "model": "model",
    "op": "operation",
    "kernel": "kernel",
    "shape": "shape",
    "us": "us",
    "floor_us": "floor",
    "floor_percent": "% of floor",
    "library": "library",
    "library_us": "library us",
    "x_library": "times faster",
    "wrong": "not timed",
}


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire bench kernels`."""
    add_flag_table(parser, Path(__file__).with_suffix(".txt"))


def run(args: argparse.Namespace) -> int:
    """Measure kernels, and print a table or JSON. Exit code 1 when a kernel's result differs from its reference."""
    from quire.bench.workload import model_names

    device = resolve_device(args.device).device
    from quire.bench import kernels as bench

    models = args.models.split(",") if args.models else list(bench.MODELS)
    unknown = [name for name in models if name not in model_names()]
    if unknown:
        raise ConfigError(f"--models {unknown[0]!r}: no such configuration: use {', '.join(model_names())}.")
    operations = bench.choose_operations(args.only.split(",") if args.only else ())
    rows = _numbers(args.rows) if args.rows else None
    result = _measure(bench, models, operations, rows, device)
    print_result(args, result, _report)
    return 1 if any("differs" in row["wrong"] for row in result["rows"]) else 0


def _measure(
    bench: Any, models: list[str], operations: list[str], rows: tuple[int, ...] | None, device: str
) -> dict[str, Any]:
    from dataclasses import replace

    import torch

    from quire.kernels.cases.timing import measure_rates
    from quire.kernels.compile_cache import use_cache_folder

    use_cache_folder()
    result: dict[str, Any] = {"device": device, "rows": []}
    with torch.inference_mode():
        rates = measure_rates(torch.device(device), torch.bfloat16)
        result |= {"memory_gb_per_s": round(rates.memory / 1e9, 1), "matrix_tflop_per_s": round(rates.matrix / 1e12, 1)}
        for model in models:
            setup = bench.make_setup(model, device)
            setup = replace(setup, rows=rows) if rows else setup
            for row in bench.measure_kernels(setup, rates, operations):
                print(f"{model} {row['op']} {row['shape']}: {row['wrong'] or row['us']}", file=sys.stderr)
                result["rows"].append({"model": model} | row)
    return result


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--rows {text}: give whole numbers above 0, separated by commas.")
    return tuple(map(int, parts))


def _report(result: dict[str, Any]) -> str:
    cells = [["" if row[name] is None else row[name] for name in COLUMNS] for row in result["rows"]]
    return (
        f"{result['device']}: copy {result['memory_gb_per_s']} GB/s (read and write), matrix product "
        f"{result['matrix_tflop_per_s']} TFLOP/s; times in microseconds, bfloat16\n\n"
        + format_table(list(COLUMNS.values()), cells)
    )

"""Plain tables and JSON, the same on a terminal and in a file."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError


def format_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table. A column is as wide as its widest cell; columns of numbers are aligned to the right."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    columns = list(zip(titles, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    number = [all(cell[:1].isdigit() or not cell for cell in column[1:]) for column in columns]
    lines = []
    for line in [list(titles), ["-" * width for width in widths], *cells]:
        parts = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, number, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def format_bytes(count: float | None) -> str:
    """Format a number of bytes: 12345 -> "12.1 KiB"."""
    if count is None:
        return "unknown size"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def write_json(path: Path | None, value: object) -> None:
    """Write a value to a file as JSON; None = no file. Raises `ConfigError` when the file cannot be written."""
    if path is not None:
        try:
            path.write_text(json.dumps(value, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--out {path}: {error.strerror}: choose another file.") from None


def print_result(args: argparse.Namespace, result: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    """Write a result to the file of --out. Print it as JSON with --json, else as the table that `table` makes."""
    write_json(args.out, result)
    print(json.dumps(result, indent=1) if args.json else table(result))

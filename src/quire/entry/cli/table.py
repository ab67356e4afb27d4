"""Plain tables, the same on a terminal and in a file."""

from collections.abc import Sequence


def format_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers (and cells that begin with a digit) to the right."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    columns = list(zip(titles, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    number = [all(cell[:1].isdigit() or not cell for cell in column[1:]) for column in columns]
    lines = []
    for line in [list(titles), ["-" * width for width in widths], *cells]:
        parts = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, number, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """12345 -> "12.1 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"

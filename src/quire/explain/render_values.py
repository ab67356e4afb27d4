"""The numbers of a tensor for a terminal: `quire weights MODEL NAME`. No torch."""

from collections.abc import Iterator
from typing import Any

from quire.entry.cli.table import format_bytes

WIDEST = 50  # characters of a histogram's longest bar


def render_values(values: dict[str, Any]) -> str:
    """Format the result of `quire.explain.values.tensor_values`, with histograms."""
    lines = list[str]()
    for one in values["stored"]:
        shape = "x".join(map(str, one["shape"])) or "scalar"
        lines.append(f"{one['name']}  {shape} {one['dtype']}, {format_bytes(one['bytes'])} in {one['file']}")
        lines += ["  " + line for line in _statistics(one["values"])] if one["values"] else []
    if weight := values["weight"]:
        lines.append(f"dequantized: {'x'.join(map(str, weight['shape']))}, {weight['scheme']}")
        lines += ["  " + line for line in _statistics(weight)]
    return "\n".join(lines)


def _statistics(found: dict[str, Any]) -> Iterator[str]:
    wrong = f"; {found['nan']:,} NaN, {found['infinite']:,} infinite" * bool(found["nan"] or found["infinite"])
    yield f"{found['count']:,} numbers, {found['zeros']:,} of them zero{wrong}"
    if found["least"] is None:
        return
    yield "from {least:.6g} to {most:.6g}, mean {mean:.4g}, standard deviation {std:.4g}, norm {norm:.6g}".format(
        **found
    )
    yield "quantiles: " + ", ".join(f"{share:.1%} {number:.4g}" for share, number in found["quantiles"])
    far = ", ".join(f"{number:.4g} at {place}" for place, number in found["farthest"])
    yield f"{found['outliers']:,} beyond 6 standard deviations; farthest from the mean: {far}"
    first, width, counts = found["histogram"]
    most = max(counts)
    for number, count in enumerate(counts):
        edge = first + number * width
        yield f"{edge:>11.4g} {'#' * -(-WIDEST * count // most):<{WIDEST}} {count:,}"

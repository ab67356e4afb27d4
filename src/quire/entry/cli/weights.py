"""`quire weights`: lists the tensors of a checkpoint from the headers of its files, or shows the numbers of one.

Only the latter imports torch, and reads weights.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config
from quire.contracts.errors import ConfigError, ModelNotFound
from quire.entry.cli.table import format_bytes, format_table

if TYPE_CHECKING:
    from quire.weights.files import Checkpoint, StoredTensor

SUMMARY = "list the tensors of a model: shapes, types, files; or show the numbers of one"
WIDEST = 50  # characters of a histogram's longest bar
FLAGS = ("model", "revision", "download_dir", "offline", "hf_token")


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire weights`."""
    add_model_argument(parser)
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="show the numbers of this tensor or module, dequantized",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tree", action="store_true", help="show modules as a tree, those that are alike once")
    add_engine_flags(parser, only=FLAGS)


def run(args: argparse.Namespace) -> int:
    """Print the tensors of a checkpoint as a table, as a tree or as JSON, or the numbers of one."""
    try:
        return _show(args, engine_config(args))
    except ModelNotFound as error:
        hint = ' For a tensor of the bundled model: quire weights "" NAME.' * (args.name is None)
        raise ModelNotFound(f"{error}{hint}") from None


def _show(args: argparse.Namespace, config: EngineConfig) -> int:
    from quire.weights.folder import HEADERS, fetch_weights, read_headers, resolve_folders

    if args.name is not None:
        if args.tree:
            raise ConfigError("--tree shows all modules: leave NAME out.")
        folder = resolve_folders(config)[0]
        fetch_weights(config, folder, lambda checkpoint: None)
        from quire.explain.values import tensor_values

        values = tensor_values(config, folder, args.name)
        print(json.dumps(values, indent=1) if args.json else render_values(values))
        return 0
    folder = resolve_folders(config, only=HEADERS)[0]
    checkpoint = read_headers(config, folder)
    if args.tree:
        made = module_tree({t.name: t for t in checkpoint.tensors.values()})
        print(json.dumps(made, indent=1) if args.json else "\n".join((str(folder), *tree_lines(made))))
        return 0
    summary = summarize(folder, checkpoint)
    print(json.dumps(summary, indent=1) if args.json else render(summary))
    return 0


Tree = dict[str, Any]


def module_tree(tensors: "Mapping[str, StoredTensor]") -> Tree:
    """Return the modules of tensors by their names' parts: a module is a dict, a tensor [shape, dtype, bytes].

    Numbered modules that are alike (the same names, shapes and types inside) are one, "0-27" or "3,7,11".
    """
    root: Tree = {}
    for tensor in tensors.values():
        *path, last = tensor.name.split(".")
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[last] = [list(tensor.shape), tensor.dtype, tensor.num_bytes]
    return _folded(root)


def _folded(node: Tree) -> Tree:
    alike: dict[str, list[str]] = {}
    inner = {name: _folded(one) if isinstance(one, dict) else one for name, one in node.items()}
    for name, one in inner.items():
        alike.setdefault(json.dumps(one) if name.isdigit() else name, []).append(name)
    return {_names(names): inner[names[0]] for names in alike.values()}


def _names(names: list[str]) -> str:
    """Return names of modules as one: numbers as "0-27" or "0-2,4"."""
    if len(names) == 1:
        return names[0]
    runs: list[list[int]] = []
    for number in sorted(map(int, names)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def tree_lines(tree: Tree, before: str = "") -> Iterator[str]:
    """Yield the lines of a tree of modules, each with the bytes of all that it stands for."""
    for number, (name, one) in enumerate(tree.items()):
        last = number == len(tree) - 1
        words = f"{name}  {format_bytes(_bytes(name, one))}"
        if isinstance(one, list):
            words = f"{name}  {'x'.join(map(str, one[0])) or 'scalar'} {one[1]}, {format_bytes(one[2])}"
        yield f"{before}{'└── ' if last else '├── '}{words}"
        if isinstance(one, dict):
            yield from tree_lines(one, before + ("    " if last else "│   "))


def _bytes(name: str, one: Tree | list[Any]) -> int:
    count = sum(int(b or a) - int(a) + 1 for a, b in re.findall(r"(\d+)(?:-(\d+))?", name)) if name[0].isdigit() else 1
    inside = one[2] if isinstance(one, list) else sum(_bytes(part, own) for part, own in one.items())
    return count * int(inside)


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


def summarize(folder: Path, checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return a checkpoint's tensors in file order, and their totals, as JSON values."""
    tensors = [
        {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.num_bytes, "file": t.file.name}
        for t in checkpoint.tensors.values()
    ]
    by_dtype: dict[str, int] = {}
    for t in checkpoint.tensors.values():
        by_dtype[t.dtype] = by_dtype.get(t.dtype, 0) + t.num_bytes
    return {
        "model": str(folder),
        "tensors": tensors,
        "num_tensors": len(tensors),
        "num_elements": sum(prod(t.shape) for t in checkpoint.tensors.values()),
        "num_bytes": checkpoint.num_bytes,
        "bytes_by_dtype": by_dtype,
        "files": [file.name for file in checkpoint.files],
    }


def render(summary: dict[str, Any]) -> str:
    """Format the result of `summarize` as a table of the tensors, with a line of totals."""
    rows = [
        (t["name"], "x".join(map(str, t["shape"])) or "scalar", t["dtype"], format_bytes(t["bytes"]), t["file"])
        for t in summary["tensors"]
    ]
    types = ", ".join(f"{dtype} {format_bytes(count)}" for dtype, count in summary["bytes_by_dtype"].items())
    total = (
        f"{summary['num_tensors']:,} tensors, {summary['num_elements']:,} elements, "
        f"{format_bytes(summary['num_bytes'])} ({types}) in {len(summary['files'])} "
        f"file{'' if len(summary['files']) == 1 else 's'}"
    )
    return f"{summary['model']}\n\n{format_table(('tensor', 'shape', 'dtype', 'size', 'file'), rows)}\n\n{total}"

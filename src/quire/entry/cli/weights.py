"""`quire weights`: lists the tensors of a checkpoint from the headers of its files, or shows the numbers of one.

Only the latter imports torch, and reads weights.
"""

import argparse
import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config
from quire.contracts.errors import ConfigError, ModelNotFound
from quire.entry.cli.table import format_bytes, format_table

if TYPE_CHECKING:
    from quire.weights.files import Checkpoint

SUMMARY = "list the tensors of a model: shapes, types, files; or show the numbers of one"
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
        from quire.explain.render_values import render_values
        from quire.explain.values import tensor_values

        values = tensor_values(config, folder, args.name)
        print(json.dumps(values, indent=1) if args.json else render_values(values))
        return 0
    folder = resolve_folders(config, only=HEADERS)[0]
    checkpoint = read_headers(config, folder)
    if args.tree:
        from quire.explain.module_tree import module_tree, tree_lines

        made = module_tree({t.name: t for t in checkpoint.tensors.values()})
        print(json.dumps(made, indent=1) if args.json else "\n".join((str(folder), *tree_lines(made))))
        return 0
    summary = summarize(folder, checkpoint)
    print(json.dumps(summary, indent=1) if args.json else render(summary))
    return 0


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

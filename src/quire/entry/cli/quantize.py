"""`quire quantize`: write a quantized checkpoint of a model. Runs on the CPU and needs memory for one tensor."""

import argparse
from pathlib import Path
from time import perf_counter

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config
from quire.entry.cli.table import format_bytes
from quire.entry.cli.weights import FLAGS
from quire.observe.progress import Progress

SUMMARY = "write a quantized checkpoint of a model, rounded to the nearest: FP8, INT8, W8A16, W4A16, AWQ"


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire quantize`."""
    from quire.quantization.written_schemes import GROUP, SCHEMES

    schemes = ", ".join(SCHEMES)
    add_model_argument(parser)
    parser.add_argument("-o", "--out", type=Path, metavar="OUT", required=True, help="new folder of the checkpoint")
    parser.add_argument("--scheme", metavar="SCHEME", required=True, help=f"one of {schemes}")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        default=0,
        help=f"columns of a group of w8a16, w4a16 and awq-int4, -1: the whole row (default: {GROUP})",
    )
    parser.add_argument(
        "--ignore",
        metavar="NAME",
        nargs="+",
        default=[],
        action="extend",
        help="modules that stay: names, whole words of them like mlp, or re:PATTERN",
    )
    parser.add_argument(
        "--lm-head",
        metavar="SCHEME",
        default="",
        help="also quantize the head; a tied head becomes a tensor of its own",
    )
    add_engine_flags(parser, only=FLAGS)


def run(args: argparse.Namespace) -> int:
    """Write the quantized checkpoint and print a summary."""
    from quire.assemble.quantize_checkpoint import Recipe, check_out, quantize_checkpoint
    from quire.weights.folder import fetch_weights, resolve_folders

    config, began = engine_config(args), perf_counter()
    check_out(args.out)
    recipe = Recipe(scheme=args.scheme, head=args.lm_head, group_size=args.group_size, ignore=tuple(args.ignore))
    folder = resolve_folders(config)[0]
    fetch_weights(config, folder, lambda checkpoint: None)
    with Progress("Quantizing", 0, enabled=True, unit="B") as progress:
        made = quantize_checkpoint(folder, args.out, recipe, progress.update)
    print(
        f"{args.out}: {args.scheme}, {made.num_quantized} matrices quantized in {perf_counter() - began:.1f} s\n"
        f"{format_bytes(made.bytes_before)} became {format_bytes(made.bytes_after)} in {len(made.files)} "
        f"file{'' if len(made.files) == 1 else 's'}\n"
        f"largest relative error of a matrix: {made.error:.2%} ({made.worst})"
    )
    return 0

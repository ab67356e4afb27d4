"""`quire verify`: compare a model, step by step, with Hugging Face's implementation."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config, settings_of
from quire.config.peer_flags import add_peer_flags
from quire.contracts.errors import ConfigError

if TYPE_CHECKING:
    from quire.explain.verify.against import StoredComparison
    from quire.explain.verify.verdict import Report

SUMMARY = "compare a model step by step with Hugging Face's implementation (needs transformers)"


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire verify`."""
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="text to compare on (default: a built-in one)")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FOLDER",
        help="checkpoint that transformers reads instead of MODEL, with the same parameters",
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--dump", type=Path, metavar="FILE", help="also store the reference's values, for --against")
    files.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="compare with the values in FILE, that --dump has stored on another machine; needs no transformers",
    )
    add_engine_flags(parser)
    add_peer_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Compare Quire with transformers and print the report. Exit code 1 when they differ by more than rounding."""
    config = engine_config(args)
    for note in settings_of(args).notes:
        print(f"quire: note: {note}", file=sys.stderr)
    report: Report | StoredComparison
    if args.against is not None:
        if args.reference is not None:
            raise ConfigError(
                "--reference is what transformers reads, and --against runs no transformers: leave it out."
            )
        from quire.explain.verify.against import against

        report = against(config.model.model, config, args.prompt, args.against)
    else:
        from quire.explain.verify.parity import verify

        report = verify(config.model.model, config, args.prompt, reference=args.reference, dump=args.dump)
    print(report.render())
    return 0 if report.ok else 1

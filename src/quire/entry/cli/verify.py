"""`quire verify`: compare a model, step by step, with Hugging Face's implementation."""

import argparse
from pathlib import Path

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config

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
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Compare Quire with transformers and print the report. Exit code 1 when they differ by more than rounding."""
    config = engine_config(args)
    from quire.explain.verify.parity import verify

    report = verify(config.model.model, config, args.prompt, reference=args.reference)
    print(report.render())
    return 0 if report.ok else 1

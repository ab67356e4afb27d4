"""Flags of one request: how `complete` and `chat` sample."""

import argparse
from typing import Any

from quire.config.flags import FlagParser

PREFIX = "sampling."
FLAGS: dict[str, tuple[Any, str, str]] = {  # field of SamplingParams -> type, metavar, help
    "temperature": (float, "X", "0 takes the most likely token (default: the model's own)"),
    "top_p": (float, "X", "sample among the likeliest tokens that have this share together"),
    "top_k": (int, "N", "sample among the N likeliest tokens; 0 or -1: off"),
    "min_p": (float, "X", "drop tokens less likely than X times the likeliest"),
    "max_tokens": (int, "N", "tokens at most (default: to the end of the context)"),
    "min_tokens": (int, "N", "tokens at least"),
    "seed": (int, "N", "same seed, same answer"),
    "presence_penalty": (float, "X", "in [-2, 2], once for every token that occurred"),
    "frequency_penalty": (float, "X", "in [-2, 2], for every time a token occurred"),
    "repetition_penalty": (float, "X", "above 1: discourage what occurred in prompt or answer"),
}


def add_sampling_flags(parser: FlagParser) -> None:
    """Add one flag per parameter; what is not given keeps the model's default."""
    group = parser.add_argument_group("Sampling")
    for name, (kind, metavar, text) in FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=PREFIX + name, type=kind, metavar=metavar, help=text,
                           default=argparse.SUPPRESS)
    group.add_argument("--stop", dest=PREFIX + "stop", action="append", metavar="TEXT", default=argparse.SUPPRESS,
                       help="stop before this text; may be repeated")
    group.add_argument("--ignore-eos", dest=PREFIX + "ignore_eos", action="store_true", default=argparse.SUPPRESS,
                       help="go on after the end of text")


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given, as keyword arguments of `SamplingParams`.

    Raises `InvalidParameter` for one out of range, before a model is loaded.
    """
    from quire.contracts.sampling import SamplingParams

    values = {name.removeprefix(PREFIX): v for name, v in vars(args).items() if name.startswith(PREFIX)}
    SamplingParams(**values)
    return values

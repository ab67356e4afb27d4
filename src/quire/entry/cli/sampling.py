"""Shared by `quire complete` and `quire chat`: the flags of a request, and a model in this process."""

import argparse
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.flags import FlagParser, add_engine_flags, add_flag_table, engine_config, given_options
from quire.entry.cli.remote import add_remote_flags
from quire.entry.keyboard_interrupt import raise_on_interrupt

if TYPE_CHECKING:
    from quire.contracts.sampling import SamplingParams
    from quire.entry.llm import LLM

PREFIX = "sampling."


def configure_asking(parser: FlagParser) -> None:
    """Add the flags of commands that ask a local or remote model. Flags that are not given keep the model's default."""
    parser.add_argument("--no-stats", action="store_true", help="do not print counts and speed")
    add_remote_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser, skip=("seed", "skip_tokenizer_init"))


def add_sampling_flags(parser: FlagParser, *, skip: Collection[str] = ()) -> None:
    """Add the flags of a request. skip: those that the command lacks, or has with another meaning"""
    add_flag_table(parser, Path(__file__).with_suffix(".txt"), PREFIX, skip=skip)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, as keyword arguments of `SamplingParams`.
    Raises `InvalidParameter` for a value out of range, before a model is loaded."""
    from quire.contracts.sampling import SamplingParams

    values = {name.removeprefix(PREFIX): v for name, v in vars(args).items() if name.startswith(PREFIX)}
    SamplingParams(**values)
    return values


@contextmanager
def local_model(args: argparse.Namespace, values: Mapping[str, Any]) -> "Iterator[tuple[LLM, SamplingParams]]":
    """Context manager: load a model. Yield the `LLM`, and sampling parameters for its `stream` methods: the
    model's defaults, changed by `values`."""
    engine_config(args)
    from quire.contracts.sampling import OutputKind
    from quire.entry.llm import LLM

    with LLM(**given_options(args)) as llm:
        raise_on_interrupt()  # not before: loading imports modules, and may be killed at any time
        yield llm, llm.get_default_sampling_params().clone(**values, output_kind=OutputKind.DELTA)

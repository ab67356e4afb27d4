"""`quire complete`: continue a text."""

import argparse
import sys

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config, given_options
from quire.contracts.errors import ConfigError, RequestFailed
from quire.entry.cli.answer import print_answer
from quire.entry.cli.sampling import add_sampling_flags, sampling_values

SUMMARY = "continue a text: from -p, or from standard input"


def configure(parser: FlagParser) -> None:
    """Add the command's flags."""
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", "-q", "--quick", dest="prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument("--no-stats", action="store_true", help="do not print counts and speed")
    add_sampling_flags(parser)
    add_engine_flags(parser, skip=("seed", "skip_tokenizer_init"))


def run(args: argparse.Namespace) -> int:
    """Stream the continuation to stdout, counts and speed to stderr. Exit code 130 when interrupted."""
    prompt = args.prompt if args.prompt is not None else _read_input()
    values = sampling_values(args)
    engine_config(args)
    from quire.contracts.sampling import OutputKind
    from quire.entry.llm import LLM

    with LLM(**given_options(args)) as llm:
        for note in llm.engine.notes:
            print(f"quire: note: {note}", file=sys.stderr)
        params = llm.get_default_sampling_params().clone(**values, output_kind=OutputKind.DELTA)
        answer = print_answer(llm.stream(prompt, params))
    if not args.no_stats:
        print(f"quire: {answer.stats()}", file=sys.stderr)
    if answer.failure is not None:
        raise RequestFailed(f"the request failed: {answer.failure}.", code=answer.failure)
    return 130 if answer.interrupted else 0


def _read_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError("nothing to continue: give -p TEXT, or text on standard input.")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("standard input is empty: give -p TEXT, or text on standard input.")
    return text

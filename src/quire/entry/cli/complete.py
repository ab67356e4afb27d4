"""`quire complete`: continue a text, with a model in this process or a server's."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_config, given_options
from quire.contracts.errors import InvalidParameter, RequestFailed
from quire.entry.cli.answer import Answer, local_pieces, print_answer
from quire.entry.cli.remote import RemoteModel, add_remote_flags, remote_model
from quire.entry.cli.sampling import add_sampling_flags, sampling_values
from quire.entry.leaving import raise_on_interrupt

SUMMARY = "continue a text: from -p, or from standard input"


def configure(parser: FlagParser) -> None:
    """Add the command's flags."""
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", "-q", "--quick", dest="prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument("--no-stats", action="store_true", help="do not print counts and speed")
    add_remote_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser, skip=("seed", "skip_tokenizer_init"))


def run(args: argparse.Namespace) -> int:
    """Stream the continuation to stdout, counts and speed to stderr. Exit code 130 when interrupted."""
    prompt = args.prompt if args.prompt is not None else _read_input()
    values = sampling_values(args)
    server = remote_model(args)
    answer = _run_here(args, prompt, values) if server is None else _run_there(server, prompt, values)
    if not args.no_stats:
        print(f"quire: {answer.stats()}", file=sys.stderr)
    if answer.failure is not None:
        raise RequestFailed(f"the request failed: {answer.failure}.", code=answer.failure)
    return 130 if answer.interrupted else 0


def _run_here(args: argparse.Namespace, prompt: str, values: Mapping[str, Any]) -> Answer:
    engine_config(args)
    from quire.contracts.sampling import OutputKind
    from quire.entry.llm import LLM

    with LLM(**given_options(args)) as llm:
        raise_on_interrupt()  # not before: loading imports, too, and leaves nothing behind
        for note in llm.engine.notes:
            print(f"quire: note: {note}", file=sys.stderr)
        params = llm.get_default_sampling_params().clone(**values, output_kind=OutputKind.DELTA)
        return print_answer(local_pieces(llm.stream(prompt, params)))


def _run_there(server: RemoteModel, prompt: str, values: Mapping[str, Any]) -> Answer:
    raise_on_interrupt()
    answer = print_answer(server.stream(prompt, values), whole_steps=False)
    if answer.reason == "length" and "max_tokens" not in values:
        print("quire: note: the server's own bound ended the text: --max-tokens asks for more.", file=sys.stderr)
    return answer


def _read_input() -> str:
    if sys.stdin.isatty():
        raise InvalidParameter("nothing to continue: give -p TEXT, or text on standard input.", param="prompt")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise InvalidParameter("standard input is empty: give -p TEXT, or text on standard input.", param="prompt")
    return text

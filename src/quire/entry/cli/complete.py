"""`quire complete`: continue a text. The model is loaded here or on a server."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from quire.config.flags import FlagParser, add_model_argument
from quire.contracts.errors import InvalidParameter, RequestFailed
from quire.entry.cli.answer import Answer, local_pieces, print_answer
from quire.entry.cli.remote import RemoteModel, remote_model
from quire.entry.cli.sampling import configure_asking, local_model, sampling_values
from quire.entry.keyboard_interrupt import raise_on_interrupt

SUMMARY = "continue a text: from -p, or from standard input"


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire complete`."""
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", "-q", "--quick", dest="prompt", metavar="TEXT", help="the text to continue")
    configure_asking(parser)


def run(args: argparse.Namespace) -> int:
    """Print the continuation of a text to stdout, token counts and speed to stderr. Exit code 130 after Ctrl-C."""
    prompt = args.prompt if args.prompt is not None else _read_input()
    values = sampling_values(args)
    server = remote_model(args)
    if server is None:
        with local_model(args, values) as (llm, params):
            answer = print_answer(local_pieces(llm.stream(prompt, params)))
    else:
        answer = _run_there(server, prompt, values)
    if not args.no_stats:
        print(f"quire: {answer.stats()}", file=sys.stderr)
    if answer.failure is not None:
        raise RequestFailed(f"the request failed: {answer.failure}.", code=answer.failure)
    return 130 if answer.interrupted else 0


def _run_there(server: RemoteModel, prompt: str, values: Mapping[str, Any]) -> Answer:
    raise_on_interrupt()
    answer = print_answer(server.stream(prompt, values), whole_steps=False)
    if answer.reason == "length" and "max_tokens" not in values:
        print(
            "quire: note: the server's default max_tokens ended the text: --max-tokens asks for more.", file=sys.stderr
        )
    return answer


def _read_input() -> str:
    if sys.stdin.isatty():
        raise InvalidParameter("nothing to continue: give -p TEXT, or text on standard input.", param="prompt")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise InvalidParameter("standard input is empty: give -p TEXT, or text on standard input.", param="prompt")
    return text

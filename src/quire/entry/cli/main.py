"""`quire`: finds the command, runs it, and turns errors into one line and an exit code.

    0   done                            2    a flag, a configuration or a model that cannot be served
    1   anything else that went wrong   130  Ctrl-C        141  nobody reads the output any more
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from quire import __version__
from quire.config.flags import FlagParser, describe_engine_flags, option_warnings
from quire.contracts.errors import ConfigError, InvalidParameter, ModelError, QuireError
from quire.entry.cli import bench, chat, complete, verify, weights

COMMANDS: dict[str, Any] = {"complete": complete, "chat": chat, "weights": weights, "verify": verify, "bench": bench}
FAILED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141


class _WholeHelp(argparse.Action):
    """`quire --help`: the commands and, computed only now, every engine flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        print(f"{parser.format_help()}\nEngine flags of complete, chat, verify and bench; --max-model-len 32k is also "
              f"QUIRE_MAX_MODEL_LEN=32k:\n\n{describe_engine_flags()}")
        parser.exit()


def build_parser() -> FlagParser:
    """The parser of the whole command line."""
    parser = FlagParser(prog="quire", description="Quire: an LLM inference engine.", add_help=False,
                        usage="quire COMMAND [MODEL] [flags]")
    parser.add_argument("-h", "--help", action=_WholeHelp, dest=argparse.SUPPRESS, help="show this")
    parser.add_argument("--version", action="version", version=f"quire {__version__}", help="show the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(prog="quire", dest="command", metavar="COMMAND", title="commands",
                                     parser_class=FlagParser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY,
                                      usage=f"quire {name} {'KIND' if module is bench else '[MODEL]'} [flags]")
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                             help="show the traceback of an error")
        module.configure(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code and raises nothing but what is a bug of ours."""
    try:
        return _dispatch(argv)
    except SystemExit as stop:  # argparse: --help, --version, a misused flag
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:
        _drop_output()
        return UNREAD
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _dispatch(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.parse_args(["--help"])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    for line in option_warnings():
        print(f"quire: warning: {line}", file=sys.stderr)
    try:
        code: int = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except QuireError as error:
        if args.debug:
            traceback.print_exc()
        print(f"quire: error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError | ModelError | InvalidParameter) else FAILED


def _drop_output() -> None:
    """Point stdout at nothing, so that the interpreter's own flush at exit does not fail, too."""
    stdout = sys.__stdout__
    if stdout is not None and sys.stdout is stdout:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stdout.fileno())
        os.close(sink)

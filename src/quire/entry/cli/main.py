"""`quire`: finds the command, runs it, and turns an error into one line and an exit code (see `exit_codes`)."""

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from quire import __version__
from quire.config.flags import FlagParser, error_text, option_warnings
from quire.contracts.errors import QuireError
from quire.entry.cli import (
    bench,
    chat,
    complete,
    completion,
    doctor,
    explain,
    quantize,
    route,
    run_batch,
    serve,
    top,
    tour,
    trace,
    verify,
    weights,
)
from quire.entry.exit_codes import DONE, INTERRUPTED, UNREAD, exit_code
from quire.entry.installed import not_installed
from quire.entry.terminal_messages import wrapped

COMMANDS: dict[str, Any] = {
    "serve": serve,
    "route": route,
    "top": top,
    "chat": chat,
    "complete": complete,
    "run-batch": run_batch,
    "bench": bench,
    "weights": weights,
    "quantize": quantize,
    "tour": tour,
    "explain": explain,
    "verify": verify,
    "trace": trace,
    "doctor": doctor,
    "completion": completion,
}
LOG = logging.getLogger("quire")
LOCAL = ("chat", "complete", "bench", "verify", "tour", "trace")  # commands whose engine logs in this process
ARGUMENTS = {
    "bench": "KIND ",
    "completion": "SHELL ",
    "doctor": "",
    "route": "--backend URL ",
    "top": "",
    "tour": "[TOUR] ",
    "trace": "[MODEL] [PROMPT] ",
}  # instead of [MODEL]
SPOKEN = ("doctor", "completion")  # commands that report the environment's problems themselves, or do not need it
SAID_OTHERWISE = {"version": "--version", "help": "--help"}  # mistaken command -> flag
EPILOG = """\
`quire COMMAND --help` lists a command's flags, `quire serve --help=TEXT` those that mention TEXT. Every option is a
flag and an environment variable: --max-model-len 32k or QUIRE_MAX_MODEL_LEN=32k. Flags of vLLM are understood.
"""


def build_parser() -> FlagParser:
    """Make the parser of the whole command line."""
    parser = FlagParser(
        prog="quire",
        description="Quire: an LLM inference and serving engine.",
        epilog=EPILOG,
        add_help=False,
        usage="quire COMMAND [MODEL] [flags]",
    )
    parser.add_argument("-h", "--help", action="help", help="show this")
    parser.add_argument(
        "--version", "-v", "-V", action="version", version=f"quire {__version__}", help="show the version"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(
        prog="quire", dest="command", metavar="COMMAND", title="commands", parser_class=FlagParser
    )
    for name, module in COMMANDS.items():
        described = f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}."
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=described,
            configure=module.configure,
            usage=f"quire {name} {ARGUMENTS.get(name, '[MODEL] ')}[flags]",
        )
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        if name == "completion":
            command.set_defaults(build_parser=build_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Return the exit code. An exception from here is a bug of Quire."""
    try:
        return _dispatch(argv)
    except SystemExit as stop:  # argparse: --help, --version, a misused flag
        return stop.code if isinstance(stop.code, int) else DONE
    except BrokenPipeError:
        _drop_output()
        return UNREAD
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _dispatch(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in SAID_OTHERWISE:
        parser.error(f"there is no command {words[0]!r}: it is `quire {SAID_OTHERWISE[words[0]]}`")
    args = parser.parse_args(words)
    if args.command is None:
        parser.parse_args(["--help"])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    if args.command not in SPOKEN:
        for line in option_warnings():
            print(f"quire: warning: {line}", file=sys.stderr)
    handler = _Notes()
    if args.command in LOCAL:
        LOG.addHandler(handler)
    try:
        code: int = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except (QuireError, MemoryError, ModuleNotFoundError) as failure:
        if args.debug:
            traceback.print_exc()
        error = not_installed(failure) if isinstance(failure, ModuleNotFoundError) else failure
        message = error_text(error) or "out of memory: use a smaller model or context."
        print(wrapped(f"quire: error: {message}"), file=sys.stderr)
        return exit_code(error)
    finally:
        LOG.removeHandler(handler)


class _Notes(logging.Handler):
    """Prints log records of an engine in this process in the format of the commands' own notes."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "error" if record.levelno >= logging.ERROR else "note"
        print(f"quire: {kind}: {self.format(record)}", file=sys.stderr)


def _drop_output() -> None:
    """Point stdout at /dev/null, so that the interpreter's flush at exit does not fail, too."""
    stdout = sys.__stdout__
    if stdout is not None and sys.stdout is stdout:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stdout.fileno())
        os.close(sink)

"""`quire chat`: a conversation in the terminal, or one question with -q. The model is loaded here or on a server."""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

from quire.config.flags import FlagParser, add_model_argument
from quire.contracts.errors import EngineError, RequestError, RequestFailed
from quire.entry.cli.answer import Answer, AnswerPiece, local_pieces, print_answer
from quire.entry.cli.remote import remote_model
from quire.entry.cli.sampling import configure_asking, local_model, sampling_values
from quire.entry.keyboard_interrupt import raise_on_interrupt

SUMMARY = "talk to a model"
HELP = "/reset forgets the conversation, exit or Ctrl-D leaves, Ctrl-C stops an answer"

Stream = Callable[[list[dict[str, Any]]], Iterator[AnswerPiece]]


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire chat`."""
    add_model_argument(parser)
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="ask this, print the answer and exit")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message of every conversation")
    configure_asking(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the message of -q, or every line of the input. Exit code 130 when Ctrl-C stopped the answer to -q."""
    values = sampling_values(args)
    server = remote_model(args)
    if server is not None:
        asked = server
        raise_on_interrupt()
        if args.quick is None and sys.stdin.isatty():
            print(f"{asked.name} at {asked.where}", file=sys.stderr)
        return _converse(args, lambda messages: asked.stream_chat(messages, values), local=False)
    with local_model(args, values) as (llm, params):
        return _converse(args, lambda messages: local_pieces(llm.stream_chat(messages, params)), local=True)


def _converse(args: argparse.Namespace, stream: Stream, *, local: bool) -> int:
    chat = Conversation(stream, local=local, system=args.system_prompt, stats=not args.no_stats)
    if args.quick is not None:
        return 130 if chat.ask(args.quick).interrupted else 0
    terminal = sys.stdin.isatty()
    failed = _talk(chat, terminal)
    return 1 if failed and not terminal else 0


class Conversation:
    """A conversation: its messages so far.

    stream   function that answers the messages
    local    True = the model is in this process, not on a server
    """

    def __init__(self, stream: Stream, *, local: bool, system: str | None, stats: bool) -> None:
        self._stream = stream
        self.local = local
        self._stats = stats
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._start)

    def reset(self) -> None:
        """Forget all messages except the system prompt."""
        self.messages = list(self._start)

    def ask(self, message: str) -> Answer:
        """Print the answer to a message, and return it.
        An interrupted answer enters the history; a message without any answer does not. Raises the `RequestError` of a
        conversation that cannot be answered (too long), and leaves the history as it was."""
        question = {"role": "user", "content": message}
        answer = print_answer(self._stream([*self.messages, question]), whole_steps=self.local)
        if self._stats:
            print(f"quire: {answer.stats()}", file=sys.stderr)
        if answer.failure is not None:
            raise RequestFailed(f"the request failed: {answer.failure}.", code=answer.failure)
        if answer.text:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer


def _talk(chat: Conversation, terminal: bool) -> int:
    """Answer every line until the end of the input. Return the number of lines that could not be answered."""
    failed = 0
    if terminal:
        import importlib.util

        if importlib.util.find_spec("readline"):
            import readline  # noqa: F401  input() has line editing and history from here on
        print(HELP, file=sys.stderr)
    while (line := _read_line(terminal)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit" | "exit" | "quit":
                break
            case "/reset":
                chat.reset()
                print("(a new conversation)", file=sys.stderr)
            case "/help":
                print(HELP, file=sys.stderr)
            case command if command.startswith("/") and " " not in command:
                print(f"unknown command {command}: {HELP}", file=sys.stderr)
            case message:
                try:
                    chat.ask(message)
                except (RequestError, EngineError) as error:
                    if chat.local and isinstance(error, EngineError):
                        raise  # a server may come back; a dead engine in this process does not
                    failed += 1
                    print(f"quire: error: {error} /reset starts a new conversation.", file=sys.stderr)
    return failed


def _read_line(terminal: bool) -> str | None:
    """Read the next line: "" after Ctrl-C, None at the end of the input."""
    try:
        return input("> " if terminal else "")
    except EOFError:
        if terminal:
            print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(f"\n{HELP}", file=sys.stderr)
        return ""

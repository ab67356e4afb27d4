"""The commands of `quire trace --step`: from a terminal, a file, or standard input; and the end of a session."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError
from quire.entry.llm import LLM
from quire.traces.step_mode import Commands, Left, Stepper
from quire.traces.trace import trace

PROMPT = "(step) "


def step_through(llm: LLM, prompt: str, script: str | None, **given: Any) -> int:
    """Run a request step by step. Return the exit code. Ctrl-C goes on to the caller as KeyboardInterrupt.

    script   file of commands; None: they come from standard input
    given    other arguments of `trace`
    """
    commands = scripted(read_script(script)) if script is not None else asked()
    say = partial(print, flush=True)
    try:
        trace(llm, prompt, stepper=Stepper(llm, commands, say), **given)
    except Left:
        say("left: the request goes no further.")
        return 0
    say("the request has ended.")
    return 0


def read_script(script: str) -> list[str]:
    """Return the commands of a file, without comments (#). Raises `ConfigError` when it cannot be read."""
    try:
        lines = Path(script).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--script: {script} cannot be read ({words}): give a file of commands.") from None
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def scripted(lines: list[str]) -> Commands:
    """Return a source of these commands, which prints each as if it was typed."""
    left = list(lines)

    def following() -> str | None:
        if not left:
            return None
        print(f"{PROMPT}{left[0]}")
        return left.pop(0)

    return following


def asked() -> Commands:
    """Return a source that reads standard input: with a prompt and a history in a terminal, else a line each."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (`input` then has a history)

    def following() -> str | None:
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            if line:
                print(f"{PROMPT}{line.rstrip()}")
            return line or None
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None

    return following

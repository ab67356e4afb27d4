"""The commands of `quire trace --step`: from a terminal, a file, or standard input; and the end of a session."""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from quire.contracts.errors import ConfigError
from quire.entry.llm import LLM
from quire.kernels.triton_runtime import INTERPRETED
from quire.observe.calls import place_of
from quire.traces.step_mode import Commands, Left, Stepper
from quire.traces.step_words import StopNames, read_command, read_script
from quire.traces.trace import engine_stops, trace

PROMPT = "(step) "


def step_through(llm: LLM, prompt: str, script: str | None, **given: Any) -> int:
    """Run a request step by step. Return the exit code. Ctrl-C goes on to the caller as KeyboardInterrupt.

    Raises ConfigError for a name in a script that no stop of this model has, before the request runs.

    script   file of commands; None: they come from standard input
    given    other arguments of `trace`
    """
    lines, names = None if script is None else read_script(script), stop_names(llm)
    for letter, name in map(read_command, lines or ()):
        if letter == "b" and name and (said := names.unknown(name)):
            raise ConfigError(f"--script: b {name}: {said}")
    say = partial(print, flush=True)
    stepper = Stepper(llm, names, asked() if lines is None else scripted(lines), say)
    try:
        trace(llm, prompt, stepper=stepper, **given)
    except Left:
        say("left: the request goes no further.")
        return 0
    say("the request has ended.")
    for name in stepper.unmet:
        say(f"it did not come to {name}.")
    return 0


def stop_names(llm: LLM) -> StopNames:
    """Return the stops that requests of an engine can come to."""

    def found() -> Iterator[tuple[str, str]]:
        for owner, attribute, name in engine_stops(llm):
            if name:
                yield name, place_of(getattr(owner, attribute))
        if llm.engine.device.device == "cuda" or INTERPRETED:  # launches have the names of Triton's kernels
            modules = [value for name, value in sys.modules.items() if name.startswith("quire.kernels.")]
            kernels = [one.fn for module in modules for one in vars(module).values() if hasattr(one, "fn")]
            yield from ((kernel.__name__, place_of(kernel)) for kernel in kernels if inspect.isfunction(kernel))

    return StopNames(found())


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

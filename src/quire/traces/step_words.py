"""The commands of step mode as words: read and checked without an engine, so that a wrong script is told at once.

Imports no torch.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from quire.contracts.errors import ConfigError
from quire.contracts.text_table import read_rows

HELP = """\
n          run this stop to its end, show what it returns, and halt at the next one
s          halt at the next stop, also inside this one
c          continue to a stop of `b`, or to the end
p NAME     print an argument, a part of it (p ctx.positions, p kv.k[1,0,2]), `result`: what the last stop
           returned, or `self`
b NAME     halt at stops of this name, in which * stands for anything (b layers.3.*), or of a file or line
           (b kernels/attention/native.py:29); again: no more; b: list them
w          the calls that have not ended, outermost first
l          the source of this stop
q          leave; so do the end of the commands and Ctrl-C
h          this list; an empty line repeats the last command"""
COMMANDS = {
    "n": "next",
    "s": "step",
    "c": "continue",
    "p": "print",
    "b": "break",
    "w": "where",
    "l": "list",
    "q": "quit",
    "h": "help",
}
TAKING = ("p", "b")  # commands that take a name
NEAREST = 4
VLLM = [tuple(row) for row in read_rows(Path(__file__).with_name("vllm_stops.txt"))]  # pattern, name in vLLM


class StepCommand(NamedTuple):
    """A command and its name, "" for none."""

    letter: str
    name: str


def read_command(line: str) -> StepCommand:
    """Return a command. Raises ValueError, in words, for one that does not exist or has too many words."""
    word, _, rest = line.strip().partition(" ")
    letter = next((letter for letter, whole in COMMANDS.items() if word in (letter, whole)), "")
    name = re.sub(r"\s+(?=[^\[]*\])", "", rest.strip())  # blanks of an index: kv.k[1, 0]
    if not letter:
        raise ValueError(f"there is no command {word!r}: h lists them.")
    if name and letter not in TAKING:
        raise ValueError(f"{word} takes no words, and {name!r} stands behind it: leave it out.")
    if " " in name:
        raise ValueError(f"{word} takes one name, and {name!r} is several: give a command for each.")
    if letter == "p" and not name:
        raise ValueError("p prints a value: give its name, such as p result.")
    return StepCommand(letter, name)


def read_script(script: str) -> list[str]:
    """Return the commands of a file, without comments (#). Raises ConfigError for a wrong one, and for no file."""
    try:
        lines = Path(script).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--script: {script} cannot be read ({words}): give a file of commands.") from None
    for number, line in enumerate(lines, 1):
        if not is_comment(line):
            try:
                read_command(line)
            except ValueError as error:
                raise ConfigError(f"--script: line {number} of {script}: {error}") from None
    return [line for line in lines if not is_comment(line)]


def is_comment(line: str) -> bool:
    """Return True for an empty line of a script, and for a comment."""
    return not line.strip() or line.lstrip().startswith("#")


class StopNames:
    """The stops that a request can come to.

    stops   (name, "file:line") of each
    """

    def __init__(self, stops: Iterator[tuple[str, str]]) -> None:
        self._stops = list(dict.fromkeys(stops))

    def unknown(self, pattern: str) -> str:
        """Return why no stop has a name or place of `b`, with the nearest ones; "" if one has it."""
        if any(matches(pattern, *stop) for stop in self._stops):
            return ""
        places = "/" in pattern
        every = dict.fromkeys(where if places else name for name, where in self._stops)
        inside = [one for one in every if pattern.strip("*.[]") and pattern.strip("*.[]") in one]
        near = inside[:NEAREST] or get_close_matches(pattern, every, NEAREST, 0.5)
        theirs = [here for here, name in VLLM if pattern in re.split(r"[ ,]+", name)]
        if theirs:
            return f"{pattern} is a name of vLLM; here the stop is {' or '.join(theirs)}: give this."
        said = f" Near: {', '.join(near)}." if near else ""
        return f"no stop of this model is called {pattern!r}, so b would never halt.{said}"


def matches(pattern: str, name: str, where: str) -> bool:
    """Return True if a stop has a name or place of `b`."""
    if fnmatch(name, pattern) or fnmatch(name, f"*.{pattern}"):
        return True
    return bool(where) and pattern in (where, where.partition(":")[0])

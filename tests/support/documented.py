"""Code blocks of pages, and the `quire` command lines in them, which the real parser of the command line reads."""

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from quire.config.flags import FlagParser, server_config, settings_of
from quire.contracts.errors import ConfigError
from quire.entry.cli.main import build_parser

MARK = re.compile(r"<!-- not run: .+ -->")
FENCE = re.compile(r"^( *)```(.*)$")
PROMPT = re.compile(r"^(\w+)?\$ ")  # of a shell: "$ " or "host0$ "
ENDS = re.compile(r"[();<>|&]+")  # words that end a command


class Block(NamedTuple):
    """A fenced block: its line in the page, its language, its text, and True if a comment before it says `not run`."""

    line: int
    language: str
    text: str
    marked: bool


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines = page.splitlines()
    begin = None
    for number, line in enumerate(lines):
        found = FENCE.match(line)
        if found and begin is None:
            begin = number
            indent, language = found.groups()
        elif found and begin is not None:
            text = "\n".join(inside.removeprefix(indent) for inside in lines[begin + 1 : number])
            before = next((old for old in reversed(lines[:begin]) if old.strip()), "")
            yield Block(begin + 1, language.strip(), text, bool(MARK.fullmatch(before.strip())))
            begin = None
    assert begin is None, f"line {begin}: a block without an end"


def typed(console: str) -> Iterator[str]:
    """Yield the lines that are typed in a block of a terminal; a line goes on behind a backslash, or inside quotes."""
    lines = iter(console.splitlines())
    for line in lines:
        if not (prompt := PROMPT.match(line)):
            continue
        line = line[prompt.end() :]
        while _goes_on(line):
            line += "\n" + next(lines)
        yield line


def _goes_on(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:  # an open quote, or a backslash at the end
        return True
    return line.endswith("\\")


def quire_commands(shell: str) -> Iterator[list[str]]:
    """Yield the words behind `quire` of each such command in a text for a shell, without dots that stand for more."""
    shell = re.sub(r"\[flags[^\]]*\]", "", shell.replace("\\\n", " "))
    lexer = shlex.shlex(shell, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not ENDS.fullmatch(word):
            words.append(word)
            continue
        while words and (re.match(r"\w+=", words[0]) or words[0] in ("exec", "then", "do", "nohup")):
            words.pop(0)
        if words[:3] == ["python", "-m", "quire"]:
            words[:3] = ["quire"]
        if words[:1] == ["quire"] and words[1:]:
            yield [word for word in words[1:] if word != "..."]
        words = []


@functools.cache
def parser() -> FlagParser:
    """Return the parser of the command line; a command's flags are added when it is first met, which takes time."""
    return build_parser()


def refusal(words: list[str]) -> str:
    """Return the reason why a command line is refused, or "". Nothing runs, and no model is looked for."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = parser().parse_args(words)
            if " " in (vars(args).get("model_argument") or ""):
                return "the name of a model has a space: is it the prompt?"
            if args.command == "serve":
                server_config(settings_of(args, server=True))
    except SystemExit as stop:
        return said.getvalue() if stop.code else ""
    except ConfigError as error:
        return str(error)
    return ""

"""The commands of docs/questions.md give the excerpts that the page shows."""

import contextlib
import difflib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quire.entry.cli.main import main

from ..support.full import FULL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "questions.md").read_text()
LONG = ("quire verify", "quire trace --from flag")  # commands that only the full run makes
ANY = "..."


def excerpts() -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the lines of its excerpt."""
    for block in re.findall(r"^```console\n(.+?)^```$", PAGE, re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = part.splitlines()
            yield command, lines


@cache
def output(command: str) -> list[str]:
    """Return the lines that a command prints, errors and notes first, without empty ones."""
    out, err = io.StringIO(), io.StringIO()
    program, *words = shlex.split(command)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if program == "quire":
            main(words)
        else:
            runpy.run_path(words[0])["main"](*words[1:])
    return [line.rstrip() for line in (err.getvalue() + out.getvalue()).splitlines() if line.strip()]


def difference(excerpt: list[str], found: list[str]) -> str:
    """Return the first line of an excerpt that the output lacks, and the output's nearest line; "": all are there."""
    place, free = 0, False
    for line in excerpt:
        if line == ANY:
            free = True
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.split(ANY)))
        places = range(place, len(found) if free else min(place + 1, len(found)))
        hit = next((at for at in places if pattern.fullmatch(found[at])), None)
        if hit is None:
            near = difflib.get_close_matches(line, found[place:], 1, 0) if free else found[place : place + 1]
            return f"  lacks    {line}\n  nearest  {''.join(near)}"
        place, free = hit + 1, False
    return "" if free or place == len(found) else f"  more     {found[place]}"


def test_commands_print_their_excerpts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in one test, so that each runs once."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["quire"])
    asked = [(command, lines) for command, lines in excerpts() if FULL or not command.startswith(LONG)]
    wrong = [f"$ {command}\n{said}" for command, lines in asked if (said := difference(lines, output(command)))]
    assert len(asked) >= 50 and not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("excerpt", "said"),
    [
        (["one", "..."], ""),
        (["...", "t...o"], "  more     three 3"),
        (["...", "t... 3"], ""),
        (["one", "three..."], "  lacks    three...\n  nearest  two"),
        (["...", "two", "..."], ""),
    ],
)
def test_excerpts_are_compared_line_by_line(excerpt: list[str], said: str) -> None:
    assert difference(excerpt, ["one", "two", "three 3"]) == said

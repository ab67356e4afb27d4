"""A tour as text: pages for a terminal, one after the other, and an HTML file with drawings."""

import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from quire.contracts.errors import ConfigError
from quire.tour.pages import Code, StopPage
from quire.tour.texts import WORDS, Tour, told

WIDTH = 120  # columns where the output is no terminal
TAGS = {"en": "en", "zh": "zh-CN"}  # of languages in HTML
STAYS = "，。；：、？！）》”,.;:?!)"  # signs that no line begins with
OPENS = "（《“"  # signs that no line ends with
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre, td, th { font: 13px/1.4 ui-monospace, monospace }
pre { overflow-x: auto; background: #f4f4f2; padding: .7rem } td { padding-right: 1rem; vertical-align: top }
figure { margin: 1rem 0; overflow-x: auto } section { border-top: 1px solid #999; margin-top: 2rem }
"""


def page_lines(page: StopPage, count: int, language: str, width: int = WIDTH) -> Iterator[str]:
    """Yield the lines of a page, of `count` pages."""
    words = WORDS[language]
    yield from ("", f"{page.number}/{count}  {page.title}", "-" * min(width, 60), "")
    yield from fold(page.idea, width)
    yield from ("", f"{_code(page, words)}  {page.code.name}  {page.code.where}")
    marked = page.code.marked
    yield from (f"  {'> '[number not in marked]} {line}".rstrip() for number, line in enumerate(page.code.lines))
    if page.code.more:
        yield f"    {words['more'].format(count=page.code.more)}"
    yield from ("", f"{words['ran']}  {_ran(page, words)}")
    yield from (f"    {line}" for line in fold(page.shapes, width - 4))
    yield from ("", words["values"])
    usual, before = dict(page.usual), words["usual"]
    names = [told(name, language) for name, _ in page.values]
    wide = max((_columns(name) for name in (*names, *[before] * bool(usual))), default=0)
    for name, (english, shown) in zip(names, page.values, strict=True):
        yield f"    {name}{' ' * (wide - _columns(name))}  {told(shown, language)}"
        if usual.get(english, shown) != shown:
            yield f"    {' ' * (wide - _columns(before))}{before}  {told(usual[english], language)}"
    yield from ("", words["try"], f"    $ {page.command}") if page.command else ("", words["see"])
    yield from (f"    {line}" for line in fold(page.see, width - 4))
    yield from ("", *fold(f"{words['vllm']}  {page.vllm}", width))


def show(tour: Tour, found: Iterable[StopPage], language: str, *, alone: bool = False) -> None:
    """Print the pages. In a terminal each page waits for Enter; b goes back, and q ends the tour.

    alone   a page is shown by itself, without the introduction
    """
    asks = sys.stdout.isatty() and sys.stdin.isatty()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    if not alone:
        print(tour.title, "", *fold(tour.about, width), sep="\n")
    count = len(tour.stops)
    every, at = tuple(found), 0
    while at < len(every):
        print(*page_lines(every[at], count, language, width), sep="\n")
        at += 1
        if asks and not alone and at < len(every):
            try:
                typed = input(f"\n[{every[at - 1].number}/{count}] {WORDS[language]['next']} ").strip().lower()[:1]
            except EOFError:
                return
            if typed == "q":
                return
            if typed == "b":
                at = max(0, at - 2)


def fold(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` columns: between words, and between Chinese characters."""
    lines, line = list[str](), ""
    for piece in _pieces(text):
        if line and _columns(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece if line else piece.lstrip()
    return [*lines, line.rstrip()] if line.strip() else lines


def _pieces(text: str) -> Iterator[str]:
    """Yield words, each with the blanks behind it, and wide characters one by one, with the signs that stay at each."""
    piece = ""
    for sign in text:
        wide = _columns(sign) == 2
        apart = wide or piece[-1:] == " " != sign or _columns(piece[-1:]) == 2
        if piece and apart and sign not in STAYS and piece[-1] not in OPENS:
            yield piece
            piece = ""
        piece += sign
    if piece:
        yield piece


def _columns(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(sign) in "WF") for sign in text)


def write_html(file: Path, tour: Tour, found: Iterable[StopPage], language: str, drawings: dict[str, str]) -> None:
    """Write a page of HTML that loads nothing. Raises ConfigError if it cannot be written.

    drawings   SVG texts by name
    """
    words = WORDS[language]
    colon = words["colon"]
    parts = [f'<!doctype html><html lang="{TAGS[language]}"><meta charset="utf-8"><title>{escape(tour.title)}</title>']
    parts += [f"<style>{STYLE}</style><h1>{escape(tour.title)}</h1><p>{_prose(tour.about)}</p>"]
    for page in found:
        code = "\n".join(_marked(page.code))
        if page.code.more:
            code += "\n" + words["more"].format(count=page.code.more)
        values = (tuple(escape(told(one, language)) for one in value) for value in page.values)
        rows = "".join(f"<tr><th>{name}</th><td>{shown}</td></tr>" for name, shown in values)
        parts.append(
            f"<section><h2>{page.number}. {escape(page.title)}</h2><p>{_prose(page.idea)}</p>"
            f"<h3>{_code(page, words)}{colon}{escape(page.code.name)} ({escape(page.code.where)})</h3><pre>{code}</pre>"
            f"<p>{words['ran']}{colon}{escape(_ran(page, words))}<br>{escape(page.shapes)}</p><table>{rows}</table>"
        )
        if page.drawing in drawings:
            parts.append(f"<figure>{drawings[page.drawing]}</figure>")
        if page.command:
            parts.append(f"<h3>{words['try']}</h3><pre>$ {escape(page.command)}</pre>")
        parts.append(f"<p>{_prose(page.see)}</p><p>{words['vllm']}{colon}{_prose(page.vllm)}</p></section>")
    try:
        file.write_text("\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {file} cannot be written ({error.strerror}): choose another file.") from None


def _prose(text: str) -> str:
    """Return a paragraph as HTML."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _marked(code: Code) -> Iterator[str]:
    """Yield the lines of a function as HTML."""
    for number, line in enumerate(code.lines):
        yield f"<mark>{escape(line)}</mark>" if number in code.marked else escape(line)


def _ran(page: StopPage, words: dict[str, str]) -> str:
    return page.ran + words["aside"].format(words[page.tie]) if page.tie else page.ran


def _code(page: StopPage, words: dict[str, str]) -> str:
    return words["reference" if page.reference else "code"]

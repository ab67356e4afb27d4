"""The Chinese pages beside the English ones: what both have in common, and copies of code blocks that have changed.

python tools/chinese.py      copies the English code blocks into the Chinese pages, where their numbers agree

What it cannot copy is for a translator: tests/unit/tools/test_chinese.py names it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LADDER = "examples/ladder/README.md"
PAIRS = {
    "README.md": "README.zh-CN.md",
    "docs/tour.md": "docs/zh/tour.md",
    "docs/questions.md": "docs/zh/questions.md",
    "docs/terms.md": "docs/zh/terms.md",
    LADDER: "docs/zh/ladder.md",
    **{f"src/quire/tour/{name}.md": f"src/quire/tour/{name}.zh.md" for name in ("token", "moe", "ranks")},
}
BLOCK = re.compile(r"^```\w*\n.*?^```$|(?:^    [^\n]*\n)+", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
UNMARKED = re.compile(r"(?<!\))\]\(([^)\s]+)\)(?!（英文）|，英文）)")  # not an image that is a link


class Structure(NamedTuple):
    """The parts of a page that do not depend on its language.

    headings   their levels, in order
    blocks     code blocks, byte for byte
    links      where links lead, with how many lead there; a link to a Chinese page counts as one to its English page
    spans      `code` in the text
    tables     rows of tables, and items of lists
    places     {names} that a tour fills in
    """

    headings: list[int]
    blocks: list[str]
    links: Counter[str]
    spans: Counter[str]
    tables: int
    places: set[str]


def structure(page: str, text: str) -> Structure:
    """Return the structure of a page. page: its path in the project"""
    prose = BLOCK.sub("", text)
    english = {other: one for one, other in PAIRS.items()}
    twin = {PAIRS.get(page, page), english.get(page, page)}
    links = Counter[str]()
    for link in LINK.findall(prose):
        path, hash_, anchor = link.partition("#")
        if (path := target(page, path)) not in twin:
            paired = path in PAIRS or path in english  # its headings differ by language
            links[english.get(path, path) + (hash_ + anchor) * (not paired)] += 1
    return Structure(
        headings=[len(signs) for signs in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        blocks=BLOCK.findall(text),
        links=links,
        spans=Counter(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)),
        tables=len(re.findall(r"^(?:\||- )", prose, re.MULTILINE)),
        places=set(re.findall(r"\{(\w+)\}", prose)),
    )


def target(page: str, link: str) -> str:
    """Return the path in the project that a link of a page leads to; the link itself if it leads out of the project."""
    path = link.partition("#")[0]
    return link if ":" in link else ((ROOT / page).parent / path).resolve().relative_to(ROOT).as_posix()


def unmarked(page: str, text: str) -> list[str]:
    """Return the links of a Chinese page to pages that are English alone, without the mark （英文） behind them."""
    known = {*PAIRS, *PAIRS.values()}
    found = UNMARKED.findall(text)
    return [link for link in found if (path := target(page, link)).endswith(".md") and path not in known]


def english(page: str) -> str:
    """Return the English text of a page; the ladder's page has the texts of its rungs, too."""
    text = (ROOT / page).read_text()
    return text if page != LADDER else "\n\n".join((text, *_rungs()))


def _rungs() -> Iterator[str]:
    for file in sorted((ROOT / LADDER).parent.glob("rung*.py")):
        source = file.read_text()
        yield f"## `{file.name}`\n\n{ast.get_docstring(ast.parse(source))}"
        for cell in re.findall(r"^# %% \[markdown\]\n((?:#.*\n)+)", source, re.MULTILINE):
            yield re.sub("^# ?", "", cell, flags=re.MULTILINE)


def differences(one: Structure, other: Structure) -> Iterator[str]:
    """Yield what two structures do not have in common."""
    for name, mine, its in zip(Structure._fields, one, other, strict=True):
        if mine == its:
            continue
        if isinstance(mine, Counter):
            yield f"{name}: only English {dict(mine - its)}, only Chinese {dict(its - mine)}"
        elif isinstance(mine, list) and len(mine) == len(its):
            number = next(i for i, pair in enumerate(zip(mine, its, strict=True)) if pair[0] != pair[1])
            yield f"{name}: number {number + 1} is {mine[number]!r} in English, {its[number]!r} in Chinese"
        else:
            yield f"{name}: {len(mine) if isinstance(mine, list) else mine} in English, {its!r} in Chinese"[:400]


def refreshed(text: str, blocks: list[str]) -> str:
    """Return a page with these code blocks, if it has as many."""
    parts = iter(blocks)
    return BLOCK.sub(lambda _: next(parts), text) if len(BLOCK.findall(text)) == len(blocks) else text


def main() -> None:
    """Copy code blocks, and print what else differs."""
    for page, other in PAIRS.items():
        told, path = structure(page, english(page)), ROOT / other
        path.write_text(refreshed(path.read_text(), told.blocks))
        for words in differences(told, structure(other, path.read_text())):
            print(f"{other}: {words}")


if __name__ == "__main__":
    main()

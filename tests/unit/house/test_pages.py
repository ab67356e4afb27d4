"""Pages: links lead somewhere, code is code, README.md and CONTRIBUTING.md name files that exist."""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from ...support.documented import Block, blocks, quire_commands, refusal, typed

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/ladder/README.md",
    ROOT / "README.zh-CN.md",
    *(ROOT / "docs").rglob("*.md"),
]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")
RUN = {  # page -> the test that runs its blocks; parts of a module are no Python by themselves
    "docs/add-a-model.md": "tests/e2e/test_add_a_model.py",
    "docs/add-a-platform.md": "tests/e2e/test_platform.py",
    "docs/clients.md": "tests/e2e/test_other_clients.py",
    "docs/offline.md": "tests/e2e/test_examples.py",
    "docs/questions.md": "tests/e2e/test_questions.py",
    "docs/trace.md": "tests/e2e/test_trace.py",
}
# Language of a block -> the function that raises an error for what is none. `console`: see below.
READERS: dict[str, Callable[[str], object]] = {
    "python": ast.parse,
    "json": json.loads,
    "yaml": lambda text: [*yaml.safe_load_all(text)],
    "toml": tomllib.loads,
}


def prose(text: str) -> str:
    """Return a page without its code: no heading and no link is in a block or between backticks."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: in lower case, with hyphens for spaces and nothing for other signs."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page that name no file, or no heading of a page."""
    for path, anchor in LINK.findall(prose(text)):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield f"{page.relative_to(ROOT)}: {path}#{anchor}"


def test_links_lead_somewhere() -> None:
    dead = [link for page in PAGES for link in dead_links(page, page.read_text())]
    assert not dead, "\n".join(dead)
    page = ROOT / "docs" / "server.md"
    assert len([*dead_links(page, "[a](none.md) [b](many.md#none) [c](#none) [d](many.md#ray) `[e](none.md)`")]) == 3


def wrong_block(block: Block) -> str:
    """Return what is wrong with a block of code, or ""."""
    if block.marked or not block.language:  # no language: output, a drawing
        return ""
    if block.language == "console":
        commands = [words for line in typed(block.text) for words in quire_commands(line)]
        return "; ".join(f"{' '.join(words)}: {why}" for words in commands if (why := refusal(words)))
    if block.language not in READERS:
        return "nothing runs this language: put `<!-- not run: why -->` above the block"
    try:
        READERS[block.language](block.text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return str(error)
    return ""


def indented(text: str) -> Iterator[str]:
    """Yield commands that stand in a page behind four spaces. Behind three more, a line has a comment."""
    for line in re.findall(r"^    (quire (?:.*\\\n *)*.*)$", text, re.M):
        yield re.split(r"(?<=\S) {3,}", re.sub(r"\\\n *", "", line))[0]


def test_code_is_read() -> None:
    """Commands by the parser of the command line, with the checks of `quire serve`; other code by its language."""
    wrong = []
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        read = [block for block in blocks(text) if name not in RUN or block.language != "python"]
        wrong += [f"{name}:{block.line}: {why}" for block in read if (why := wrong_block(block))]
        if not page.stem.startswith("log"):  # the log has commands of its time
            commands = [words for line in indented(text) for words in quire_commands(line)]
            wrong += [f"{name}: {' '.join(words)}: {why}" for words in commands if (why := refusal(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("```console\n$ quire serve MODEL --max-modl-len 8\n```", "--max-modl-len"),
        ("```console\n$ K=1 quire serve MODEL --port 99999 # none\n```", "port"),
        ("```console\n$ cd x && quire explian\n```", "explian"),
        ('```console\n$ quire complete "The json module"\n```', "is it the prompt?"),
        ("```json\n{\n```", "Expecting"),
        ("```nginx\nserver {}\n```", "not run: why"),
        ("<!-- not run: nginx -->\n\n```nginx\nserver {}\n```", ""),
        ("```console\nhost0$ quire serve M -tp 8 \\\n    --port 1 | tee log\nquire none\n```", ""),
    ],
)
def test_wrong_code_is_found(block: str, said: str) -> None:
    (found,) = [wrong_block(one) for one in blocks(block)]
    assert said in found and bool(said) == bool(found)


def test_pages_that_are_run_are_read_by_their_tests() -> None:
    assert [page for page, test in RUN.items() if page.rpartition("/")[2] not in (ROOT / test).read_text()] == []


def test_the_files_of_the_way_exist() -> None:
    text, missing, folder = (ROOT / "CONTRIBUTING.md").read_text(), [], ""
    for name in re.findall(r"`([\w/<>]+\.py)`", text):
        folder = name.rpartition("/")[0] or folder
        file = name if "/" in name else f"{folder}/{name}"
        if "<" not in file and not any((ROOT / top / file).exists() for top in ("src/quire", "")):
            missing.append(name)
    missing = [name for name in missing if not name.startswith(("entrypoints/", "model_executor/"))]
    assert not missing, (
        f"CONTRIBUTING.md names files that do not exist: {missing}. A name without a folder is in the "
        "folder of the name before it; names are below src/quire, or below the project."
    )


def test_the_tree_has_every_room() -> None:
    rooms = {path.name for path in (ROOT / "src" / "quire").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert set(re.findall(r"`src/quire/(\w+)/`", (ROOT / "README.md").read_text())) == rooms


@pytest.mark.parametrize("page", ["docs/log.md", "docs/log_archive.md"])
def test_the_index_of_the_log_names_every_entry(page: str) -> None:
    """An anchor is its heading in lower case, with hyphens for spaces and nothing for other signs."""
    text = (ROOT / page).read_text()
    headings = re.findall(r"^## (\d.+)$", text, re.M)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    entries = zip(headings, anchors, strict=True)
    lines = [f"  - {heading[5:10]} [{heading[13:]}](#{anchor})" for heading, anchor in entries]
    index = text.split("\n## ")[1].splitlines()
    assert [line for line in lines if line not in index] == []
    assert [line for line in index if line.startswith("  - ") and line not in lines] == []

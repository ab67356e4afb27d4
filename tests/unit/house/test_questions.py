"""docs/questions.md has questions with answers. It and docs/terms.md name code that exists."""

import re
from pathlib import Path

from ...support.named_code import NAMED, missing

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "questions.md").read_text()
QUESTION = r"^### (\d+)\. ([^\n]+)\n\n```console\n(.+?)^```\n\n(.+?)\n\nCode: "
QUESTIONS = re.findall(QUESTION, PAGE, re.M | re.S)


def test_questions_have_numbers_commands_and_short_answers() -> None:
    assert [int(number) for number, *_ in QUESTIONS] == list(range(1, 1 + PAGE.count("\n### "))) and len(QUESTIONS) > 50
    beliefs = [title for _, title, *_ in QUESTIONS if title.startswith('"')]
    assert len(beliefs) >= 8
    for number, title, block, answer in QUESTIONS:
        commands = re.findall(r"^\$ ", block, re.M)
        assert len(commands) == 1 or (title in beliefs and len(commands) == 2), number
        assert 2 <= len(re.findall(r"[.:](?=\s|$)", answer)) <= 8, f"{number}: two to five sentences"


def test_the_code_exists() -> None:
    assert missing(PAGE) == []
    assert missing("`kv/pool.py` (`BlockPool.take`, `none`), `kv/none.py`") == ["kv/pool.py: none", "kv/none.py"]


def test_each_word_has_its_code() -> None:
    text = (DOCS / "terms.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 60 and missing(text) == []
    assert [row for row in rows if not NAMED.match(row.split(" | ")[-1].removesuffix(" |"))] == []

"""docs/meetings.md and README's matrix are what the table of the package says."""

from pathlib import Path

from meetings_page import BEGIN, END, EXAMPLES, READMES, matrix, page

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "PYTHONPATH=src python tools/meetings_page.py"


def test_the_page_about_meetings_is_current() -> None:
    assert (ROOT / "docs" / "meetings.md").read_text() == page().rstrip() + "\n", COMMAND


def test_the_matrix_of_the_readmes_is_current() -> None:
    for name, words in READMES.items():
        assert f"{BEGIN}{matrix(words)}{END}" in (ROOT / name).read_text() and words.keys() <= EXAMPLES.keys(), COMMAND

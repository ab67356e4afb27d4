"""docs/flags.md is what the options and the table of vLLM's flags say."""

from pathlib import Path

from flags_page import flags_page


def test_the_page_about_flags_is_current() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "flags.md"
    assert page.read_text() == flags_page(), "python tools/flags_page.py > docs/flags.md"

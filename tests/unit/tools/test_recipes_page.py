"""docs/recipes.md is what `quire explain` plans for the bundled configurations."""

import pytest

from recipes_page import HEAD, MODELS, PAGE, RECIPES, Recipe, command, page, row

from ...support.documented import quire_commands, refusal
from ...support.full import FULL

FEW = ("qwen3-8b-awq", "qwen3.5-9b", "llama-3.3-70b")  # a plan of DeepSeek-V3 takes 0.4 s
TEXT = PAGE.read_text()


@pytest.mark.parametrize("recipe", [one for one in RECIPES if FULL or one.folder in FEW], ids=lambda one: one.folder)
def test_the_rows_are_current(recipe: Recipe) -> None:
    assert row(recipe) in TEXT.splitlines(), "PYTHONPATH=src python tools/recipes_page.py"


def test_the_page_is_made_of_all_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of the other test: a plan of each model takes seconds."""
    rows = iter(line for line in TEXT.splitlines() if line.startswith("| ["))
    monkeypatch.setattr("recipes_page.row", lambda recipe: next(rows))
    assert page(RECIPES) == TEXT and TEXT.startswith(HEAD)


def test_there_are_twenty_and_each_can_be_started() -> None:
    assert len(RECIPES) >= 20 and all((MODELS / one.folder / "config.json").is_file() for one in RECIPES)
    for recipe in RECIPES:
        assert [refusal(words) for words in quire_commands(command(recipe).removeprefix("$ "))].count("") >= 1

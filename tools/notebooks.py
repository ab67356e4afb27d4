"""Writes the rungs of examples/ladder as notebooks: `python tools/notebooks.py`. A test compares them with the files.

A file's docstring and cells "# %% [markdown]" become text, cells "# %%" code. Notebooks have no outputs.
"""

import ast
import json
from pathlib import Path
from typing import Any

LADDER = Path(__file__).parents[1] / "examples" / "ladder"


def notebook(source: str) -> str:
    """Return the notebook of a file with cells, as JSON."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    first, *cells = source.split("\n# %%")
    made = [_cell("markdown", docstring)]
    del first
    for cell in cells:
        kind, _, text = cell.partition("\n")
        if "[markdown]" in kind:
            made.append(_cell("markdown", "\n".join(line.removeprefix("#").strip() for line in text.splitlines())))
        else:
            made.append(_cell("code", text))
    for number, one in enumerate(made):
        one["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip().splitlines(keepends=True), **code}


def main() -> None:
    """Write the notebook of each rung."""
    for file in sorted(LADDER.glob("rung*.py")):
        file.with_suffix(".ipynb").write_text(notebook(file.read_text()))


if __name__ == "__main__":
    main()

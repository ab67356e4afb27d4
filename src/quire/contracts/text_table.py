"""Reader of tables that are data, not code: text files beside the module that reads them."""

import re
from collections.abc import Iterator
from pathlib import Path


def read_rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a table in a text file, each as a list of cells; " | " separates cells.

    A line that begins with # is a comment. A line that begins with spaces continues the row above. `$name = words`
    defines the text of every later cell `$name`.
    """
    words: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", path.read_text()).splitlines():
        if line.startswith("$"):
            name, _, words[name] = line.partition(" = ")
        elif line and not line.startswith("#"):
            cells = [cell.strip() for cell in line.split(" | ")]
            yield [words.get(cell, cell) for cell in cells]

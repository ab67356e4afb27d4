"""Tables of words that are data, not code: text files beside the module that reads them."""

import re
from collections.abc import Iterator
from pathlib import Path


def read_rows(path: Path) -> Iterator[list[str]]:
    """The cells of every row, separated by " | ".

    A line that begins with # is a comment, one that begins with spaces goes on with the row above, and `$name = words`
    gives words that a cell `$name` below stands for.
    """
    words: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", path.read_text()).splitlines():
        if line.startswith("$"):
            name, _, words[name] = line.partition(" = ")
        elif line and not line.startswith("#"):
            cells = [cell.strip() for cell in line.split(" | ")]
            yield [words.get(cell, cell) for cell in cells]

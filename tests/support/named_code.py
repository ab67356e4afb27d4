"""Names of files, and of the functions in them, in a text: "`kv/pool.py` (`BlockPool.take`, `BlockPool`)"."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/.-]+\.(?:py|txt|c|md|toml))`(?:\s\(((?:`[\w.]+`(?:,\s)?)+)\))?")


def missing(text: str) -> list[str]:
    """Return the files below src/quire or below the project, and names in them, that do not exist."""
    wrong = []
    for file, names in NAMED.findall(text):
        path = next((ROOT / top / file for top in ("src/quire", "") if (ROOT / top / file).exists()), None)
        if path is None:
            wrong.append(file)
            continue
        wrong += [f"{file}: {name}" for name in re.findall(r"`([\w.]+)`", names) if name not in defined(path)]
    return wrong


@cache
def defined(path: Path) -> set[str]:
    """Return the functions, classes and values of a module; methods and fields as `Class.name`."""
    found = set[str]()

    def walk(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(before + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{before}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(before + target.id for target in targets if isinstance(target, ast.Name))

    walk(ast.parse(path.read_text()).body, "")
    return found

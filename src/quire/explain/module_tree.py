"""The modules of a checkpoint as a tree, read off the names of its tensors: `quire weights --tree`. No torch."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quire.entry.cli.table import format_bytes

if TYPE_CHECKING:
    from quire.weights.files import StoredTensor

Tree = dict[str, Any]


def module_tree(tensors: "Mapping[str, StoredTensor]") -> Tree:
    """Return the modules of tensors by their names' parts: a module is a dict, a tensor [shape, dtype, bytes].

    Numbered modules that are alike (the same names, shapes and types inside) are one, "0-27" or "3,7,11".
    """
    root: Tree = {}
    for tensor in tensors.values():
        *path, last = tensor.name.split(".")
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[last] = [list(tensor.shape), tensor.dtype, tensor.num_bytes]
    return _folded(root)


def _folded(node: Tree) -> Tree:
    alike: dict[str, list[str]] = {}
    inner = {name: _folded(one) if isinstance(one, dict) else one for name, one in node.items()}
    for name, one in inner.items():
        alike.setdefault(json.dumps(one) if name.isdigit() else name, []).append(name)
    return {_names(names): inner[names[0]] for names in alike.values()}


def _names(names: list[str]) -> str:
    """Return names of modules as one: numbers as "0-27" or "0-2,4"."""
    if len(names) == 1:
        return names[0]
    runs: list[list[int]] = []
    for number in sorted(map(int, names)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def tree_lines(tree: Tree, before: str = "") -> Iterator[str]:
    """Yield the lines of a tree of modules, each with the bytes of all that it stands for."""
    for number, (name, one) in enumerate(tree.items()):
        last = number == len(tree) - 1
        words = f"{name}  {format_bytes(_bytes(name, one))}"
        if isinstance(one, list):
            words = f"{name}  {'x'.join(map(str, one[0])) or 'scalar'} {one[1]}, {format_bytes(one[2])}"
        yield f"{before}{'└── ' if last else '├── '}{words}"
        if isinstance(one, dict):
            yield from tree_lines(one, before + ("    " if last else "│   "))


def _bytes(name: str, one: Tree | list[Any]) -> int:
    count = sum(int(b or a) - int(a) + 1 for a, b in re.findall(r"(\d+)(?:-(\d+))?", name)) if name[0].isdigit() else 1
    inside = one[2] if isinstance(one, list) else sum(_bytes(part, own) for part, own in one.items())
    return count * int(inside)

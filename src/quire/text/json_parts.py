"""A JSON schema as a document: its parts, and the parts that a reference means.

Knows where schemas stand in a schema. Knows no other keyword, and nothing of llguidance.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Part = dict[str, Any]
Placed = tuple[str, Any]  # a part with its path
MAPS = ("properties", "patternProperties")  # from names to schemas
LISTS = ("allOf", "anyOf", "oneOf")
INSIDE = (*LISTS, "items", "prefixItems", "additionalItems", "additionalProperties")  # a schema, or a list of schemas
WHERE = "x-quire-where"  # in a schema that is a part of another: its path there


class Document:
    """A schema with everything that is defined in it. `path`: of its root, where it is a part of another."""

    def __init__(self, root: Part) -> None:
        self.root, self.path = root, str(root.pop(WHERE, ""))
        self._named: list[tuple[str, Part]] = []
        stack: list[Placed] = [("", root)]
        while stack:
            path, node = stack.pop()
            if isinstance(node, dict) and any(isinstance(node.get(key), str) for key in ("$id", "id", "$anchor")):
                self._named.append((path, node))
            stack += [each for each in _inner(path, node) if isinstance(each[1], dict | list)]

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The schemas that hold anywhere in an output, each once, with its path."""
        queue: deque[Placed] = deque([(self.path, self.root)])
        seen: set[int] = set()
        while queue:
            path, node = queue.popleft()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            yield path, node
            for key, value in [*node.items()]:
                at = f"{path}.{key}" if path else key
                if key in MAPS and isinstance(value, dict) or key in INSIDE and isinstance(value, list):
                    queue.extend(_inner(at, value))
                elif key in INSIDE:
                    queue.append((at, value))
                elif key == "$ref":
                    queue.extend(self.targets(value))

    def targets(self, reference: Any) -> list[Placed]:
        """The schemas that a reference may mean: by its place, its $anchor or its $id. [] where none does."""
        if not isinstance(reference, str):
            return []
        base, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        documents = [(path, part) for path, part in self._named if not base or _file(_id(part)) == _file(base)]
        documents = documents if base else [("", self.root), *documents]
        if not fragment:
            return [*documents]
        if not fragment.startswith("/"):
            return [each for each in self._named if fragment in (each[1].get("$anchor"), _id(each[1])[1:])]
        path = fragment[1:].replace("/", ".")
        return [(f"{at}.{path}" if at else path, found) for at, part in documents
                if isinstance(found := _at(part, fragment), dict | bool)]  # fmt: skip


def _inner(path: str, node: Any) -> Iterator[Placed]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield f"{path}.{key}" if path else str(key), value


def _id(part: Part) -> str:
    return str(part.get("$id") or part.get("id") or "")


def _file(uri: str) -> str:
    return uri.partition("#")[0].rpartition("/")[2]


def _at(node: Any, pointer: str) -> Any:
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node

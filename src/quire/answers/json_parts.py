"""A JSON schema as a document: its parts (subschemas), and the targets of references.

Knows the keywords that contain schemas. Knows no other keyword, and nothing of llguidance.
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
MOST_NAMESAKES = 8  # schemas with one name: several are a mistake, or documents of several folders
WHERE = "x-quire-where"  # keyword in a schema taken from another one: its path there


class SchemaDocument:
    """A JSON schema and the targets of its $refs. `path`: path of `root` in the schema it was taken from, else ""."""

    def __init__(self, root: Part) -> None:
        self.root, self.path = root, str(root.pop(WHERE, ""))
        self._homes: dict[int, Placed] = {}  # id of a part -> the nearest part around it with an $id, or the root
        self._named: dict[str, list[Placed]] = {}  # by the file name of an $id, and by "#" + anchor
        stack: list[tuple[str, Any, Placed]] = [("", root, ("", root))]
        while stack:
            path, node, home = stack.pop()
            if isinstance(node, dict):
                for name in _names(node):
                    if len(same := self._named.setdefault(name, [])) < MOST_NAMESAKES:
                        same.append((path, node))
                    home = home if name.startswith("#") else (path, node)
                self._homes[id(node)] = home
            stack += [(at, each, home) for at, each in _inner(path, node) if isinstance(each, dict | list)]

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield (path, schema) for the root and each subschema that applies somewhere in an output, each once."""
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
                    queue.extend(self.targets(node))

    def targets(self, part: Part) -> list[Placed]:
        """Return (path, schema) of each possible target of the $ref in `part`: a JSON pointer, an $anchor or an $id."""
        if not isinstance(reference := part.get("$ref"), str):
            return []
        base, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"#{fragment}", [])
        documents = self._named.get(_file(base), []) if base else [self._homes.get(id(part), ("", self.root))]
        path = fragment.replace("/", ".")
        return [
            (f"{at}{path}".removeprefix("."), found)
            for at, document in documents
            if isinstance(found := _at(document, fragment), dict | bool)
        ]


def _inner(path: str, node: Any) -> Iterator[Placed]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield f"{path}.{key}" if path else str(key), value


def _names(part: Part) -> Iterator[str]:
    for key in ("$id", "id", "$anchor"):
        if isinstance(name := part.get(key), str) and name:
            yield f"#{name}" if key == "$anchor" else name if name.startswith("#") else _file(name)


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

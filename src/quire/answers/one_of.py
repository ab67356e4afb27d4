"""Alternatives of `oneOf` in a JSON schema: a proof that no value fits two of them, so that `anyOf` means the same.

Knows types, constants, required properties, references and lists of schemas. Other keywords are ignored, which is safe:
they can only make a proof fail.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from quire.answers.json_parts import Part, SchemaDocument

FUEL = 50_000  # limit of compared schemas per structured output
DEPTH = 16
KINDS = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
NUMBERS = {"integer": ("integer",), "number": ("integer", "fraction")}
ALL = frozenset((*KINDS.values(), "integer", "fraction"))
Constants = dict[str, set[str]]  # kind -> constants of a schema as JSON
Skipped = frozenset[tuple[int, str]]  # (id of a schema, keyword) pairs that are ignored


class Alternatives:
    """Comparison of the schemas in a `oneOf`: can two of them fit the same output?
    `closes`: returns True for a schema whose objects can only have the properties that it lists."""

    def __init__(self, document: SchemaDocument, closes: Callable[[Part], bool]) -> None:
        self._document, self._closes, self._fuel = document, closes, FUEL
        self._constants: dict[int, Constants] = {}  # cache by the id of the schema

    def clash(self, part: Part) -> tuple[int, ...] | None:
        """Return the indices of two schemas in the `oneOf` of `part` that may fit the same output; None if no two may.
        Returns () when the schemas are too many or too deeply nested to compare."""
        try:
            return self._clash(part, part["oneOf"], frozenset({(id(part), "oneOf")}))
        except RecursionError:  # a constant is nested too deep to be compared
            return ()

    def _clash(self, part: Part, ways: Any, skipped: Skipped) -> tuple[int, ...] | None:
        for second in range(len(ways) if isinstance(ways, list) else 0):
            for first in range(second):
                one, other = [part, ways[first]], [part, ways[second]]
                if not (
                    self._apart(one, other, False, skipped)
                    or (self._apart(one, other, True, skipped) and self._apart(other, one, True, skipped))
                ):
                    return (first, second) if self._fuel > 0 else ()
        return None

    def _apart(self, one: list[Any], other: list[Any], closed: bool, skipped: Skipped, depth: int = 0) -> bool:
        """Return True if provably no value fits all schemas of `one` and all of `other`.
        `closed`: objects written for `one` have only names that its schemas list."""
        self._fuel -= 1 + len(one) + len(other)
        if self._fuel < 0 or depth > DEPTH:
            return False
        sides = self._spread(one, skipped), self._spread(other, skipped)
        if any(part is False for side in sides for part in side):
            return True
        kinds = self._kinds(sides[0]) & self._kinds(sides[1])
        values = [self._values(side, kinds) for side in sides]
        if not kinds or any(each is not None and not each for each in values):
            return True
        if values[0] is not None and values[1] is not None and values[0].isdisjoint(values[1]):
            return True
        if kinds == {"object"}:
            for name in dict.fromkeys(name for side in sides for part in side for name in _required(part)):
                held = [self._named(side, name, closed and at == 0) for at, side in enumerate(sides)]
                if self._apart(held[0], held[1], closed, skipped, depth + 1):
                    return True
        for at, part, key in _choices(sides, skipped):
            used = skipped | {(id(part), key)}
            more = [[[*side, way] if at == place else side for place, side in enumerate(sides)] for way in part[key]]
            if all(self._apart(each[0], each[1], closed, used, depth + 1) for each in more):
                return True
        return False

    def _spread(self, parts: list[Any], skipped: Skipped) -> list[Any]:
        """Return all schemas that apply where these do: theirs, those of `allOf` and of references; without True."""
        stack, found, seen = [*parts], [], set()
        while stack:
            part = stack.pop()
            if part is False:
                return [False]
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            found.append(part)
            stack += part["allOf"] if isinstance(part.get("allOf"), list) else ()
            targets = self._document.targets(part)
            stack += [target for _, target in targets] if len(targets) == 1 else ()
        return found

    def _named(self, parts: list[Part], name: str, closed: bool) -> list[Any]:
        """Return the schemas that apply to a property in objects of these schemas."""
        found: list[Any] = []
        for part in parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                found.append(properties[name])
            elif not part.get("patternProperties"):
                found.append(part.get("additionalProperties", not (closed and self._closes(part))))
        return found

    def _kinds(self, parts: list[Part]) -> frozenset[str]:
        kinds = ALL
        for part in parts:
            if (types := part.get("type")) is not None:
                listed = types if isinstance(types, list) else [types]
                kinds &= {kind for name in listed for kind in NUMBERS.get(str(name), (str(name),))}
            if (constants := self._listed(part)) is not None:
                kinds &= constants.keys()
        return kinds

    def _values(self, parts: list[Part], kinds: frozenset[str]) -> set[str] | None:
        """Return the possible values as JSON; None = any value."""
        lists = [constants for part in parts if (constants := self._listed(part)) is not None]
        left = [set().union(*(texts for kind, texts in constants.items() if kind in kinds)) for constants in lists]
        return set.intersection(*left) if left else None

    def _listed(self, part: Part) -> Constants | None:
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list) and id(part) not in self._constants:
            found = self._constants[id(part)] = {}
            for value in values:
                found.setdefault(_kind(value), set()).add(_text(value))
        return self._constants.get(id(part))


def _choices(sides: tuple[list[Part], list[Part]], skipped: Skipped) -> Iterator[tuple[int, Part, str]]:
    for at, side in enumerate(sides):
        for part in side:
            for key in ("anyOf", "oneOf"):
                if isinstance(part.get(key), list) and (id(part), key) not in skipped:
                    yield at, part, key


def _required(part: Part) -> list[str]:
    names = part.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _kind(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "integer" if value % 1 == 0 else "fraction"
    return KINDS.get(type(value), "null")


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value % 1 == 0
    return json.dumps(int(value) if whole else value, sort_keys=True)

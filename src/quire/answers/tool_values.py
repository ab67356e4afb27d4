"""Conversion of arguments to JSON text: bare values, typed by a schema, and Python literals, never evaluated."""

import ast
import json
from typing import Any

KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
ANY, STRING = frozenset({"any"}), frozenset({"string"})
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)  # raised by parsers for hostile text


def branches(schema: Any) -> list[dict[str, Any]]:
    """Return the schemas in `anyOf` or `oneOf`, one level deep. A schema with several types gives one per type."""
    if not isinstance(schema, dict):
        return [{}]
    parts, types = schema.get("anyOf") or schema.get("oneOf"), schema.get("type")
    if isinstance(parts, list):
        return [part if isinstance(part, dict) else {} for part in parts]
    return [{**schema, "type": kind} for kind in types] if isinstance(types, list) and types else [schema]


def kinds_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; with "any" if an alternative has no `type`, `enum` or `const`."""
    found: set[str] = set()
    for part in branches(schema):
        values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
        kinds = [kind for kind in KINDS.values() if kind == part.get("type")]
        found.update(kinds or [KINDS[type(value)] for value in values] or ANY)
    return frozenset(found)


def typed(text: str, kinds: frozenset[str]) -> str:
    """Convert an argument's text to JSON: as JSON or a Python literal if that fits `kinds`, else as a string."""
    for read in (str.strip, lambda bare: json.dumps(ast.literal_eval(bare.strip()), allow_nan=False)):
        try:
            found = read(text)
            kind = KINDS[type(json.loads(found, parse_constant=int))]  # int("NaN") raises
        except UNREADABLE:
            continue
        if "string" not in kinds or kinds & {kind, *ANY} or (kind == "integer" and "number" in kinds):
            return found
    return json.dumps(text, ensure_ascii=False)


def python_arguments(call: str) -> str:
    """Return the keyword arguments of a Python call as a JSON object. Raises the errors in `UNREADABLE`."""
    tree = _JsonNames().visit(ast.parse(call, mode="eval").body)
    if not isinstance(tree, ast.Call) or tree.args:
        raise ValueError("not a call with keyword arguments only")
    arguments: dict[str, Any] = {}
    for keyword in tree.keywords:
        value = ast.literal_eval(keyword.value)
        arguments.update({keyword.arg: value} if keyword.arg else value)  # **{"a-b": 1}: not an identifier
    return json.dumps(arguments, allow_nan=False)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace JSON's true, false and null by their values."""
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node

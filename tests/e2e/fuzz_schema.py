"""Request bodies made from the API's own description: mostly what it allows, sometimes one step beside it.

`shot(document, seed, index)` is a function of its arguments alone, so that a failure can be repeated by its number.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

from .fuzz_bodies import HEADERS, LARGE, ODD, Raw, Shot, dump

WORDS = [
    "",
    "a",
    "hi",
    "once upon a time",
    "user",
    "assistant",
    "system",
    "tool",
    "text",
    "function",
    "auto",
    "\u00e9\U0001f642",
    "<|im_end|>",
    "{{ 7 * 7 }}",
    '{"a": 1}',
    "[a-z]+",
    'root: "a"',
    "quire-tiny",
    "input_text",
    "message",
]
NUMBERS = [0, 1, 2, 3, 7, 8, 100, 255, 8191, 2**31 - 1, 2**53, -1, 0.5, 1.5, -0.0, 1e-9, 1e308]
NAMES = ["a", "enable_thinking", "type", "properties", "5", "name", "__class__"]
DEPTH = 6  # below which everything is as small as it may be


def shot(document: dict[str, Any], seed: int, index: int) -> Shot:
    """The request of a number."""
    rng = random.Random(f"{seed}/{index}")
    asked = sorted(operations(document))
    path, schema = asked[index % len(asked)], document["components"]["schemas"]
    value = Maker(rng, schema, rng.choice((0.0, 0.0, 0.02, 0.1))).make(operation_schema(document, path))
    if isinstance(value, dict) and rng.random() < 0.9:
        if "max_tokens" in value or "messages" in path:
            value["max_tokens"] = rng.randrange(1, 5)
        value.pop("model", None)
        if path.startswith("/v1/messages"):
            value["model"] = "quire-tiny"
    headers = {"content-type": "application/json"}
    if rng.random() < 0.05:
        name = rng.choice(sorted(HEADERS))
        headers[name] = rng.choice(HEADERS[name])
    return Shot(
        path,
        dump(value).encode("utf-8", "surrogatepass"),
        headers,
        chunked=rng.random() < 0.05,
        leaves=rng.random() < 0.01,
    )


def operations(document: dict[str, Any]) -> Iterator[str]:
    """Every path that takes a body."""
    return (path for path, found in document["paths"].items() if "requestBody" in found.get("post", {}))


def operation_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of the body of a path."""
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


class Maker:
    """Values of schemas. `wrong`: how often a value is one that the schema does not have."""

    def __init__(self, rng: random.Random, schemas: dict[str, Any], wrong: float) -> None:
        self._rng, self._schemas, self._wrong = rng, schemas, wrong

    def make(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Return a value."""
        rng = self._rng
        if depth and rng.random() < self._wrong:
            return rng.choice(LARGE if rng.random() < 0.02 else ODD)
        if "$ref" in schema:
            return self.make(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            options = [option for option in schema["anyOf"] if depth < DEPTH or "$ref" not in option]
            return self.make(rng.choice(options or schema["anyOf"]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        return getattr(self, "_" + schema.get("type", "any"))(schema, depth)

    def _object(self, schema: dict[str, Any], depth: int) -> Any:
        rng, required = self._rng, schema.get("required", ())
        share = rng.choice((0.05, 0.15, 0.4)) if depth < DEPTH else 0.0
        made = {
            name: self.make(kind, depth + 1)
            for name, kind in schema.get("properties", {}).items()
            if name in required or rng.random() < share
        }
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            names = [str(rng.randrange(9000)) for _ in range(3)] if "propertyNames" in schema else NAMES
            made |= {rng.choice(names): self.make(extra, depth + 1) for _ in range(rng.randrange(3))}
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> Any:
        if "prefixItems" in schema:
            return [self.make(kind, depth + 1) for kind in schema["prefixItems"]]
        low = schema.get("minItems", 0)
        most = min(schema.get("maxItems", low + 3), low + self._rng.choice((0, 1, 1, 3)) if depth < DEPTH else low)
        return [self.make(schema.get("items", {}), depth + 1) for _ in range(self._rng.randint(low, max(low, most)))]

    def _string(self, schema: dict[str, Any], depth: int) -> Any:
        fitting = [
            word
            for word in WORDS
            if schema.get("minLength", 0) <= len(word) <= schema.get("maxLength", 10**9)
            and re.search(schema.get("pattern", ""), word)
        ]
        return self._rng.choice(fitting or WORDS)

    def _number(self, schema: dict[str, Any], depth: int) -> Any:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e308)), schema.get("maximum", 1e308)
        fitting = [number for number in (*NUMBERS, low, high) if low <= number <= high]
        return self._rng.choice(fitting)

    def _integer(self, schema: dict[str, Any], depth: int) -> Any:
        return int(self._number({"minimum": -(2**63), "maximum": 2**63 - 1} | schema, depth))

    def _boolean(self, schema: dict[str, Any], depth: int) -> Any:
        return self._rng.random() < 0.5

    def _null(self, schema: dict[str, Any], depth: int) -> Any:
        return None

    def _any(self, schema: dict[str, Any], depth: int) -> Any:
        kinds: list[Any] = [None, True, *WORDS, *NUMBERS, {"type": "object"}, {"type": "array", "items": {}}, {}]
        picked = self._rng.choice(kinds)
        known = isinstance(picked, dict) and picked and depth < DEPTH
        return Raw(self._rng.choice(ODD[:8])) if picked == {} else self.make(picked, depth + 1) if known else picked

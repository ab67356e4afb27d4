"""JSON schemas made up from a seed, and who judges whether a text is one of a schema."""

import json
import random
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

Schema = dict[str, Any]
NAMES = ("a", "name", "名前", "naïve", "x y", 'q"uo\\te', "😀", "id", "", "a/b~c", "Ключ", "\n", "$ref", "enum")
WORDS = ("red", "über", "日本", "a\\b", 'say "no"', "tab\t", "😀😀", "", "null", "1", "e\u0301")
PATTERNS = (
    "^[a-z]{1,6}$",
    "^[A-Z]{2}-[0-9]{2,4}$",
    "^(yes|no|maybe)$",
    "^[а-я]{2}[0-9]?$",
    '^[^"]{1,3}$',
    "^.{0,2}$",
    "ok$",
    r"^\d{3}\.\d{1,2}$",
    "^(ab|cd){1,3}$",
    "^a|b$",
    r"^[^\\\"]{2}$",
    r"^\w+@\w+\.(com|org)$",
)
FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid")
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"


@CHECKER.checks("time")
def is_time(text: object) -> bool:
    """Of RFC 3339."""
    return not isinstance(text, str) or re.fullmatch(TIME, text) is not None


@CHECKER.checks("date-time")
def is_date_time(text: object) -> bool:
    """Of RFC 3339."""
    return not isinstance(text, str) or re.fullmatch(r"\d{4}-\d\d-\d\d[tT ]" + TIME, text) is not None


def fault(text: str, schema: Schema) -> str:
    """Why a text is not one of a schema; "" when it is. Numbers are compared as they are written."""
    try:
        value = json.loads(text, parse_float=Decimal)
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        jsonschema.Draft202012Validator(exact, format_checker=CHECKER).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:200] or "fault"
    return ""


def begins(text: str, schema: Schema) -> bool:
    """Return True if a text may be the beginning of a value of the schema, byte for byte: neither Quire's reading
    of schemas nor the model's tokens have a part in it."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))
    given = text.encode()
    return matcher.try_consume_tokens([*given]) == len(given)


class Maker:
    """Schemas of a seed, all of which llguidance takes."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._defs: Schema = {}

    def schema(self) -> Schema:
        """A schema with its definitions."""
        made = self._any(self._rng.randint(0, 3))
        return made | {"$defs": self._defs} if self._defs else made

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self._integer,
            self._multiple,
            self._number,
            self._string,
            self._pattern,
            self._format,
            self._enum,
            self._const,
            self._plain,
            self._types,
        ]
        nodes: list[Callable[[int], Schema]] = [
            self._object,
            self._object,
            self._map,
            self._array,
            self._tuple,
            self._any_of,
            self._one_of,
            self._all_of,
            self._ref,
        ]
        return self._rng.choice(nodes)(depth - 1) if depth else self._rng.choice(leaves)()

    def _integer(self) -> Schema:
        low = self._rng.choice((-(10**6), -100, -1, 0, 7, 99, 2**31))
        low_key, high_key = self._rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
        return {"type": "integer", low_key: low, high_key: low + self._rng.choice((2, 10, 1000))}

    def _multiple(self) -> Schema:
        return {"type": "integer", "multipleOf": self._rng.choice((2, 3, 7, 25, 100)), "minimum": -50, "maximum": 900}

    def _number(self) -> Schema:
        low = self._rng.choice((-2.5, 0, 0.001, 99.75))
        return {"type": "number", "minimum": low, "maximum": low + 1.5} | self._rng.choice(
            ({}, {"multipleOf": 0.25}, {"multipleOf": 0.1}, {"exclusiveMinimum": low})
        )

    def _string(self) -> Schema:
        low = self._rng.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._rng.randint(0, 8)}

    def _pattern(self) -> Schema:
        pattern = self._rng.choice(PATTERNS)
        bounded = pattern[-2:] == "}$" and self._rng.random() < 0.5
        return {"type": "string", "pattern": pattern} | ({} if bounded else {"maxLength": 12})

    def _format(self) -> Schema:
        return {"type": "string", "format": self._rng.choice(FORMATS)}

    def _enum(self) -> Schema:
        values = [*WORDS, 1, -2.5, None, True, [1, "x"], {"k": [None]}, 10**15]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 6))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice(({"a": [1, {"ü": "\u2028"}]}, "x" * 30, [], False, -0.125, "\u0000\x7f"))}

    def _plain(self) -> Schema:
        return {"type": self._rng.choice(("boolean", "null"))}

    def _types(self) -> Schema:
        return {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 0, "maximum": 99}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(1, 4))
        required = [name for name in names if self._rng.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": required,
            "additionalProperties": False,
            "description": "so",
        }

    def _map(self, depth: int) -> Schema:
        value, closed = self._any(depth), {"type": "object", "maxProperties": self._rng.randint(1, 2)}
        return closed | (
            {"patternProperties": {"^k[0-9]$": value}, "additionalProperties": False}
            if self._rng.random() < 0.5
            else {"additionalProperties": value, "minProperties": 1}
        )

    def _array(self, depth: int) -> Schema:
        low = self._rng.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": low, "maxItems": low + self._rng.randint(0, 2)}

    def _tuple(self, depth: int) -> Schema:
        count = self._rng.randint(1, 3)
        return {
            "type": "array",
            "prefixItems": [self._any(depth) for _ in range(count)],
            "minItems": count,
            "items": False,
        }

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        return {"oneOf": [self._string(), self._integer(), {"type": "array", "items": self._any(depth), "maxItems": 2}]}

    def _all_of(self, depth: int) -> Schema:
        open_object = {"type": "object", "properties": {"p": self._any(depth)}, "required": ["p"]}
        return {
            "allOf": [
                open_object,
                {"properties": {"p": True, "q": {"type": "boolean"}}, "required": ["q"], "additionalProperties": False},
            ]
        }

    def _ref(self, depth: int) -> Schema:
        if not self._defs or self._rng.random() < 0.5:
            made = self._any(depth)
            self._defs[f"d{len(self._defs)} ~/"] = made
        name = self._rng.choice([*self._defs])
        return {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1').replace(' ', '%20')}"}


def closed(**properties: Any) -> Schema:
    """An object with all of its properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def nested(depth: int, inside: Any) -> Schema:
    """So many objects in each other."""
    return closed(a=nested(depth - 1, inside)) if depth else inside


TREE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"enum": [1, 2]},
                "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {
        **{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(30)},
        "30": closed(end={"$ref": "#/definitions/word"}),
    },
    "definitions": {"word": {"type": "string", "maxLength": 5}},
}
TRICKY: dict[str, Schema] = {
    "a tree": TREE,
    "a chain of references": CHAIN,
    "40 deep": nested(40, {"type": "boolean"}),
    "arrays 20 deep": json.loads(
        '{"type":"array","minItems":1,"maxItems":1,"items":' * 20 + '{"type":"boolean"}' + "}" * 20
    ),
    "enum of 10,000": {"enum": [f"value {i}" for i in range(10_000)]},
    "enum of 10,000 numbers": closed(n={"enum": [*range(0, 70_000, 7)]}),
    "40 properties": closed(**{f"p{i}": {"enum": [i, None]} for i in range(40)}),
    "20 optional": {
        "type": "object",
        "properties": {f"p{i}": {"enum": [i]} for i in range(20)},
        "additionalProperties": False,
    },
    "a narrow interval": {"type": "number", "exclusiveMinimum": 0.99, "exclusiveMaximum": 1.01, "multipleOf": 0.001},
    "negative": {"type": "integer", "exclusiveMinimum": -1000, "maximum": -998},
    "up to 2**53": {"type": "integer", "minimum": 2**53 - 2, "maximum": 2**53},
    "emoji": {"type": "string", "minLength": 4, "maxLength": 4, "pattern": "^[😀-😂]*$"},
    "a quote": {"type": "array", "items": {"type": "string", "pattern": '^[^"]{3}$'}, "minItems": 3, "maxItems": 3},
    "20 variants": {"anyOf": [closed(kind={"const": i}, **{f"f{i}": {"type": "null"}}) for i in range(20)]},
}

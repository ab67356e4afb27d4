"""What llguidance takes of a JSON schema and does not hold: refused here, or written so that it does."""

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.contracts.errors import InvalidParameter

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas
DATA = ("const", "enum", "default", "examples")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
EXACT, LONGEST = 2**53, 2**63 - 1
WIDEST = {"minimum": -EXACT, "exclusiveMinimum": -EXACT, "maximum": EXACT, "exclusiveMaximum": EXACT}
LONGEST_PATTERN = 20_000  # characters; every class of one is compiled
CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)  # one that does not end takes all
CONTROLS = [chr(code) for code in range(32) if code != 10]


def holdable(schema: Any) -> Any:
    """The schema as llguidance holds it; changed in place. Raises `InvalidParameter` where it would hold it to less."""
    if not isinstance(schema, dict):
        return schema
    if isinstance(own := schema.get("x-guidance"), dict) and own.get("lenient"):
        return schema
    for part in _parts(schema):
        for key in ("const", "enum", *BOUNDS):
            most, value = EXACT if key in BOUNDS else LONGEST, part.get(key)
            if isinstance(value, int | float) and abs(value) > EXACT and value * WIDEST.get(key, 0) > 0:
                part[key] = value = WIDEST[key]  # a wider range than can be held, as for any number of 64 bits
            numbers = _numbers(value) if key in DATA or isinstance(value, int | float) else ()
            if any(abs(number) > most for number in numbers):
                raise _refusal(f"{key} has a number beyond ±{most}, which is not read exactly: give a smaller one, or "
                               "a string with a pattern")
        least, required = part.get("minProperties", 0), part.get("required", ())
        if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
            raise _refusal("minProperties counts a name that is written twice as two: require names instead")
        if part.get("format") == "unknown":
            raise _refusal("Unknown format: unknown")
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _pattern(pattern)
        if isinstance(patterns := part.get("patternProperties"), dict):
            part["patternProperties"] = {_pattern(pattern): schema for pattern, schema in patterns.items()}
    return schema


def holdable_in_lark(text: str) -> str:
    """The same of every `%json` of a grammar."""
    parts = re.split(r"(%json\s*)(?=\{)", text)
    for at in range(2, len(parts), 2):
        try:
            schema, end = json.JSONDecoder().raw_decode(parts[at])
        except (ValueError, RecursionError):  # which llguidance says better, if it is no text between quotes
            continue
        parts[at] = json.dumps(holdable(schema)) + parts[at][end:]
    return "".join(parts)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a schema, and in what may be one."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in MAPS and isinstance(value, dict):
                    stack.extend(value.values())
                elif key not in DATA:
                    stack.append(value)


def _numbers(value: Any) -> Iterator[int | float]:
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, int | float):
            yield node
        elif isinstance(node, list | dict):
            stack.extend(node.values() if isinstance(node, dict) else node)


def _pattern(pattern: str) -> str:
    """A class of characters that has all controls also lets a quote and a backslash pass that it excludes: one control
    less where it excludes anything."""
    if len(pattern) > LONGEST_PATTERN:
        raise _refusal(f"a pattern has {len(pattern)} characters: at most {LONGEST_PATTERN} are taken")
    return CLASS.sub(lambda found: _narrowed(found[0]), pattern)


def _narrowed(chars: str) -> str:
    try:
        known = re.compile(chars)
    except re.error:  # syntax of Rust: a bare quote or backslash in it is taken for excluded
        leaky = chars[:2] == "[^" and ('"' in chars or r"\\" in chars)
    else:
        leaky = all(map(known.match, CONTROLS)) and not (known.match('"') and known.match("\\"))
    if chars[0] != "[" or not leaky:
        return chars
    if chars[:2] != "[^" or chars[:3] == "[^]":
        raise _refusal(f"pattern: {chars} has control characters, and not both of quote and backslash: leave the "
                       "control characters out")
    return r"[^\x0b" + chars[2:]


def _refusal(reason: str) -> InvalidParameter:
    return InvalidParameter(f"structured_outputs: json: {reason}.", param="structured_outputs")

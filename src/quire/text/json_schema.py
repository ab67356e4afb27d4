"""JSON schemas, written so that llguidance holds an output to them. Keywords that it cannot hold are refused or noted.

Knows the keywords of JSON schema and the gaps of llguidance. Knows no tokens and no grammar.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from quire.contracts.errors import InvalidParameter

Part = dict[str, Any]
MAPS = ("properties", "patternProperties")  # from names to schemas
LISTS = ("allOf", "anyOf", "oneOf")
INSIDE = (*LISTS, "items", "prefixItems", "additionalItems", "additionalProperties")  # a schema, or a list of schemas
# Keywords that llguidance does not implement, and values with which they ask for nothing.
UNHELD: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}), "not": (False,),
    "propertyNames": (True, {}), "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},),
    **dict.fromkeys(("if", "then", "else", "contains", "minContains", "maxContains", "$dynamicRef", "$dynamicAnchor",
                     "$recursiveRef", "$recursiveAnchor"), ()),
}  # fmt: skip
NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}  # without it: for nothing
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())  # that are enforced
UUID = re.compile(r"uuid([1-8])")
NAMES = {"enum", "const", "pattern", "minLength", "maxLength", "format"}  # of `propertyNames`, which are rewritten
DATA = ("const", "enum")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
EXACT, LONGEST = 2**53, 2**63 - 1
WIDEST = {"minimum": -EXACT, "exclusiveMinimum": -EXACT, "maximum": EXACT, "exclusiveMaximum": EXACT}
MOST_COPIED = 2**20  # characters of schemas of properties that are made of names
LONGEST_PATTERN = 20_000  # characters; every class of one is compiled
# Of one object. A mask takes 20 ms with 500 of them and a vocabulary of 150,000, and its time grows with their square.
MOST_OPTIONAL = 512
LONGEST_PATH = 200  # characters of a path in a message
CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)  # one that does not end takes all
CONTROLS = [chr(code) for code in range(32) if code != 10]
WHERE = "x-quire-where"  # in a schema that is a part of another: its path there
LENIENT = 'leave it out, or send "x-guidance": {"lenient": true} in the schema to have it ignored'
NO_CODES = 'nrbtf\\"'  # escapes without \uXXXX


@dataclass
class Reading:
    """Findings about the schemas of a form.

    notes      keywords that are not enforced, each with its path
    optional   properties that may be left out, of all objects
    patterns   an object has names of a pattern
    listed     an object has listed names and others
    """

    notes: list[str] = field(default_factory=list)
    optional: int = 0
    patterns: bool = False
    listed: bool = False

    def note(self, path: str, keyword: str) -> None:
        """Remember a keyword that is not enforced; names of properties may hold anything, line breaks too."""
        self.notes.append(f"{_shown(path)}{ascii(keyword)[1:-1][:LONGEST_PATH]}")


def holdable(schema: Any, reading: Reading | None = None) -> Any:
    """Return the schema as llguidance holds it; it is changed in place. Errors: `InvalidParameter` with a path."""
    if not isinstance(schema, dict):
        return schema
    reading = reading or Reading()
    own = schema.get("x-guidance", {})
    lenient = isinstance(own, dict) and bool(own.get("lenient"))
    parts = [*_parts(schema)]
    beside = _beside(schema, [part for _, part in parts])
    for path, part in parts:
        single = id(part) not in beside
        _drop_unheld(schema, path, part, reading, lenient, single)
        if not lenient:
            _check_numbers(path, part)
            if isinstance(pattern := part.get("pattern"), str):
                part["pattern"] = _pattern(path, pattern)
            if isinstance(patterns := part.get("patternProperties"), dict):
                part["patternProperties"] = {_pattern(path, pattern): each for pattern, each in patterns.items()}
        _close(path, part, reading, single)
    return schema


def holdable_in_lark(text: str, reading: Reading | None = None) -> str:
    """The same of every `%json` of a grammar."""
    parts, reading = re.split(r"(%json\s*)(?=\{)", text), reading or Reading()
    for at in range(2, len(parts), 2):
        try:
            schema, end = json.JSONDecoder().raw_decode(parts[at])
        except (ValueError, RecursionError):  # which llguidance says better, if it is no text between quotes
            continue
        reading.listed = False
        schema = holdable(schema, reading)
        own = schema.get("x-guidance", {})
        # Without escapes like \u0061 no other name repeats a listed one. Literals would lose their control characters.
        if reading.listed and isinstance(own, dict) and "\\u00" not in json.dumps(schema, ensure_ascii=False):
            schema["x-guidance"] = {"json_allowed_escapes": NO_CODES, **own}
        parts[at] = json.dumps(schema) + parts[at][end:]
    return "".join(parts)


def _parts(root: Part) -> Iterator[tuple[str, Part]]:
    """The schemas that hold anywhere in an output, each once, with its path."""
    queue: deque[tuple[str, Any]] = deque([(str(root.pop(WHERE, "")), root)])
    seen: set[int] = set()
    while queue:
        path, node = queue.popleft()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        for key, value in [*node.items()]:
            at = f"{path}.{key}" if path else key
            if key in MAPS and isinstance(value, dict):
                queue.extend((f"{at}.{name}", each) for name, each in value.items())
            elif key in INSIDE:
                several = isinstance(value, list)
                queue.extend(((f"{at}.{i}", each) for i, each in enumerate(value)) if several else [(at, value)])
            elif key == "$ref" and (target := _target(root, value)) is not None:
                queue.append((unquote(value[2:]).replace("/", "."), target))
            elif key == "$ref":  # by an anchor or a name: it may be any of them
                queue.extend((f"{name}.{each}", root[name][each]) for name in ("$defs", "definitions")
                             if isinstance(root.get(name), dict) for each in root[name])  # fmt: skip


def _target(root: Part, reference: Any) -> Part | None:
    """The schema that a reference within the document means; None where it is of another kind."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for name in unquote(reference[2:]).split("/") if len(reference) > 2 else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal():
            found = dict(enumerate(found)).get(int(name))
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _beside(root: Part, parts: list[Part]) -> set[int]:
    """The ids of schemas that hold at one place together with another: none of them can be closed by itself."""
    stack: list[Part] = []
    members: dict[int, list[Part]] = {}
    for part in parts:
        inner = [each for key in LISTS if isinstance(part.get(key), list) for each in part[key]]
        inner.append(_target(root, part.get("$ref")))
        members[id(part)] = [each for each in inner if isinstance(each, dict)]
        ways = sum(key in part for key in (*LISTS, "$ref"))
        objects = {*MAPS, *UNHELD, "required", "additionalProperties", "minProperties", "maxProperties"} & part.keys()
        if ways > 1 or ways and objects or len(part.get("allOf") or ()) > 1:
            stack.append(part)
    marked: set[int] = set()
    while stack:
        part = stack.pop()
        if id(part) not in marked:
            marked.add(id(part))
            stack += members.get(id(part), ())
    return marked


def _drop_unheld(root: Part, path: str, part: Part, reading: Reading, lenient: bool, single: bool) -> None:
    """Take out keywords that llguidance does not implement. An error names a keyword that asks for something."""
    for key in [key for key in part if key in UNHELD]:
        value = part[key]
        if value in UNHELD[key] or key.endswith("Anchor") or NEEDS.get(key, key) not in part:
            del part[key]
        elif key == "uniqueItems":
            del part[key]
            if part.get("maxItems") not in (0, 1):
                reading.note(path, key)
        elif key == "propertyNames" and single and _name_properties(root, path, part, reading):
            del part[key]
        elif lenient:
            del part[key]
            reading.note(path, key)
        else:
            raise _refusal(path, f"{key} is not implemented: {LENIENT}")
    if not isinstance(name := part.get("format"), str) or name in FORMATS:
        return
    if (version := UUID.fullmatch(name)) and "pattern" not in part:
        part.update(format="uuid", pattern=f"^.{{14}}{version[1]}.{{4}}[89abAB]")
        return
    del part["format"]
    reading.note(path, f"format {name}")


def _name_properties(root: Part, path: str, part: Part, reading: Reading) -> bool:
    """Write `propertyNames` as properties or as a pattern. False where that is not possible."""
    names, extra = part["propertyNames"], part.get("additionalProperties", True)
    if isinstance(names, dict) and "$ref" in names:
        names = _target(root, names["$ref"])
    if not isinstance(names, dict) or any(part.get(key) for key in MAPS) or {*LISTS, "$ref", *UNHELD} & names.keys():
        return False
    kinds = NAMES & names.keys()
    if kinds & {*DATA}:
        listed = names["enum"] if "enum" in names else [names["const"]]
        if len(kinds) > 1 or not isinstance(listed, list) or len(listed) * len(str(extra)) > MOST_COPIED:
            return False
        part.update(properties={name: extra for name in listed if isinstance(name, str)}, additionalProperties=False)
    elif kinds - {"format"} == {"pattern"} and isinstance(names["pattern"], str):
        part.update(patternProperties={names["pattern"]: extra}, additionalProperties=False)
    elif "pattern" in kinds:
        return False
    elif kinds - {"format"}:
        pattern = f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
        part.update(patternProperties={pattern: extra}, additionalProperties=False)
    if "format" in kinds:
        reading.note(f"{path}.propertyNames".lstrip("."), f"format {names['format']}")
    return True


def _close(path: str, part: Part, reading: Reading, single: bool) -> None:
    """Let an object with properties have no others where the schema does not speak of others: they could repeat a name
    without end."""
    patterns = part.get("patternProperties")
    named, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return
    optional = sum(name not in required for name in named)
    reading.optional += optional
    reading.patterns |= bool(patterns)
    if optional > MOST_OPTIONAL:
        raise _refusal(path, f"{optional} of its properties may be left out, at most {MOST_OPTIONAL} may: require "
                             "some, or nest them in objects")
    if (named or patterns) and single and not {*DATA, "additionalProperties"} & part.keys():
        if all(name in named for name in required):
            part["additionalProperties"] = False
    free = part.get("additionalProperties") is not False
    reading.listed |= bool((named or required) and (free or patterns) or patterns and free)


def _check_numbers(path: str, part: Part) -> None:
    for key in (*DATA, *BOUNDS):
        most, value = EXACT if key in BOUNDS else LONGEST, part.get(key)
        if isinstance(value, int | float) and abs(value) > EXACT and value * WIDEST.get(key, 0) > 0:
            part[key] = value = WIDEST[key]  # a wider range than can be held, as for any number of 64 bits
        numbers = _numbers(value) if key in DATA or isinstance(value, int | float) else ()
        if any(abs(number) > most for number in numbers):
            raise _refusal(path, f"{key} has a number beyond ±{most}, which is not read exactly: give a smaller one, "
                                 "or a string with a pattern")
    least, required = part.get("minProperties", 0), part.get("required", ())
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise _refusal(path, "minProperties counts a name that is written twice as two: require names instead")


def _numbers(value: Any) -> Iterator[int | float]:
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, int | float):
            yield node
        elif isinstance(node, list | dict):
            stack.extend(node.values() if isinstance(node, dict) else node)


def _pattern(path: str, pattern: str) -> str:
    """A class of characters that has all controls also lets a quote and a backslash pass that it excludes: one control
    less where it excludes anything."""
    if len(pattern) > LONGEST_PATTERN:
        raise _refusal(path, f"a pattern has {len(pattern)} characters: at most {LONGEST_PATTERN} are taken")
    return CLASS.sub(lambda found: _narrowed(path, found[0]), pattern)


def _narrowed(path: str, chars: str) -> str:
    try:
        known = re.compile(chars)
    except re.error:  # syntax of Rust: a bare quote or backslash in it is taken for excluded
        leaky = chars[:2] == "[^" and ('"' in chars or r"\\" in chars)
    else:
        leaky = all(map(known.match, CONTROLS)) and not (known.match('"') and known.match("\\"))
    if chars[0] != "[" or not leaky:
        return chars
    if chars[:2] != "[^" or chars[:3] == "[^]":
        raise _refusal(path, f"pattern: {chars} has control characters, and not both of quote and backslash: leave the "
                             "control characters out")
    return r"[^\x0b" + chars[2:]


def _refusal(path: str, reason: str) -> InvalidParameter:
    return InvalidParameter(f"structured_outputs: the grammar cannot be used: {_shown(path)}{reason}.",
                            param="structured_outputs")


def _shown(path: str) -> str:
    return f"{ascii(path)[1:-1][:LONGEST_PATH]}: " if path else ""

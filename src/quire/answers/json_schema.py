"""JSON schemas, rewritten so that llguidance can enforce them. Keywords it cannot enforce are refused or noted.

Knows the keywords of JSON schema and the gaps of llguidance. Knows no tokens and no grammar.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.answers.json_parts import LISTS, MAPS, Part, SchemaDocument
from quire.answers.one_of import Alternatives
from quire.answers.text_formats import FORMATS
from quire.contracts.errors import InvalidParameter, shown

# Keywords that llguidance does not implement -> values with which they have no effect.
UNHELD: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}), "not": (False,),
    "propertyNames": (True, {}), "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},),
    **dict.fromkeys(("then", "else"), (True, {})),
    **dict.fromkeys(("if", "contains", "minContains", "maxContains", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
                     "$recursiveAnchor"), ()),
}  # fmt: skip
# Keyword -> keywords of which it needs one to have an effect.
NEEDS = {
    "then": ("if",),
    "else": ("if",),
    "if": ("then", "else"),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
OURS = re.compile(r"uuid[1-8]|date|time|date-time")  # formats that llguidance lacks, or holds less exactly than we do
NAMES = {"enum", "const", "pattern", "minLength", "maxLength", "format"}  # keywords of `propertyNames` we can rewrite
DATA = ("const", "enum")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
EXACT, LONGEST = 2**53, 2**63 - 1
WIDEST = {"minimum": -EXACT, "exclusiveMinimum": -EXACT, "maximum": EXACT, "exclusiveMaximum": EXACT}
MOST_COPIED = 2**20  # characters of property schemas made from the names of `propertyNames`
LOOKS = re.compile(r"\(\?<?[=!]|\(\?P=|\\[1-9bBkcGZ]")  # outside character classes
LONGEST_PATTERN = 20_000  # characters; every character class in it is compiled
# Optional properties of one object. A mask takes 20 ms with 500 and a vocabulary of 150,000; the time is quadratic.
MOST_OPTIONAL = 512
MOST_NAMED = 64  # properties of an object with minProperties 1
LONGEST_PATH = 200  # characters of a path in a message
CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)  # an unclosed class extends to the end
CONTROLS = [chr(code) for code in range(32) if code != 10]
LENIENT = 'leave it out, or send "x-guidance": {"lenient": true} in the schema to have it ignored'
NO_CODES = 'nrbtf\\"'  # escapes without \uXXXX
CODED = re.compile(r"\\u00|\x7f|\\\\[xuUavpP]")  # in a schema as JSON: its texts may need \uXXXX escapes
UNHELD_HERE = "x-quire-unheld"  # keyword in a schema: its keywords that this place in a grammar cannot enforce


@dataclass
class Reading:
    """Findings about the schemas of a structured output.

    notes      keywords that are not enforced, each with its path
    optional   number of optional properties of all objects
    patterns   an object has patternProperties
    listed     an object has listed properties and may have others
    lenient    the schema has "x-guidance": {"lenient": true}: note keywords that cannot be enforced, do not refuse them
    """

    notes: list[str] = field(default_factory=list)
    optional: int = 0
    patterns: bool = False
    listed: bool = False
    lenient: bool = False

    def note(self, path: str, keyword: str) -> None:
        """Add a keyword that is not enforced to `notes`. The path is escaped: names of properties may have any text."""
        self.notes.append(f"{_shown(path)}{ascii(keyword)[1:-1][:LONGEST_PATH]}")

    def cannot(self, path: str, keyword: str, reason: str) -> None:
        """Refuse a keyword that cannot be enforced, or note it if the schema is lenient."""
        if not self.lenient:
            raise refusal(path, f"{reason}: {LENIENT}")
        self.note(path, keyword)


def holdable(schema: Any, reading: Reading | None = None) -> Any:
    """Rewrite a schema, in place, so that llguidance enforces it, and return it. `reading` collects the findings.
    Raises `InvalidParameter`, with a path, for a part that cannot be enforced."""
    if not isinstance(schema, dict):
        return schema
    reading = reading or Reading()
    own = schema.get("x-guidance", {})
    reading.lenient = isinstance(own, dict) and bool(own.get("lenient"))
    unheld = schema.pop(UNHELD_HERE, ())
    document = SchemaDocument(schema)
    for key in unheld:
        reading.cannot(document.path, key, f"{key} is not implemented in this model's way to call")
    parts = [*document.parts()]
    beside = _beside(document, [part for _, part in parts])
    alternatives = Alternatives(document, lambda part: id(part) not in beside and _closes(part))
    clashes = {id(part): alternatives.clash(part) for _, part in parts if "oneOf" in part}
    for path, part in parts:
        single = id(part) not in beside
        if "$ref" in part and not document.targets(part):
            raise refusal(path, f"$ref: {shown(part['$ref'])} is not defined in the schema: add it, as under $defs")
        _drop_unheld(document, path, part, reading, single)
        if "oneOf" in part:
            _one_of(path, part, reading, clashes[id(part)])
        if not reading.lenient:
            _check_numbers(path, part)
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _pattern(path, part["pattern"], reading)
        if isinstance(patterns := part.get("patternProperties"), dict):
            part["patternProperties"] = {_pattern(path, name, reading): each for name, each in patterns.items()}
        _close(path, part, reading, single)
    return schema


def holdable_in_lark(text: str, reading: Reading | None = None) -> str:
    """Return a Lark grammar with the schema of every `%json` rewritten as by `holdable`."""
    parts, reading = re.split(r"(%json\s*)(?=\{)", text), reading or Reading()
    for at in range(2, len(parts), 2):
        try:
            schema, end = json.JSONDecoder().raw_decode(parts[at])
        except (ValueError, RecursionError):  # llguidance reports it better; or "%json" stands inside quotes
            continue
        reading.listed = False
        schema = holdable(schema, reading)
        own = schema.get("x-guidance", {})
        # Forbidding escapes like \u0061 keeps other names from repeating a listed one. Control characters need them.
        if reading.listed and isinstance(own, dict) and not CODED.search(json.dumps(schema, ensure_ascii=False)):
            schema["x-guidance"] = {"json_allowed_escapes": NO_CODES, **own}
        parts[at] = json.dumps(schema) + parts[at][end:]
    return "".join(parts)


def _beside(document: SchemaDocument, parts: list[Part]) -> set[int]:
    """Return the ids of schemas that apply together with another schema: these cannot be closed on their own."""
    stack: list[Part] = []
    members: dict[int, list[Part]] = {}
    for part in parts:
        inner = [each for key in LISTS if isinstance(part.get(key), list) for each in part[key]]
        inner += [target for _, target in document.targets(part)]
        members[id(part)] = [each for each in inner if isinstance(each, dict)]
        ways = sum(key in part for key in (*LISTS, "$ref"))
        objects = {*MAPS, *UNHELD, "required", "additionalProperties", "minProperties", "maxProperties"} & part.keys()
        several = isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1
        if ways > 1 or ways and objects or several:
            stack.append(part)
    marked: set[int] = set()
    while stack:
        part = stack.pop()
        if id(part) not in marked:
            marked.add(id(part))
            stack += members.get(id(part), ())
    return marked


def _drop_unheld(document: SchemaDocument, path: str, part: Part, reading: Reading, single: bool) -> None:
    """Remove keywords that llguidance does not implement. Those with an effect are rewritten, noted or refused."""
    for key in [key for key in part if key in ("then", "else") and part[key] in UNHELD[key]]:
        del part[key]
    for key in [key for key in part if key in UNHELD]:
        value = part[key]
        if value in UNHELD[key] or key.endswith("Anchor") or not any(need in part for need in NEEDS.get(key, (key,))):
            del part[key]
        elif key == "uniqueItems":
            del part[key]
            if part.get("maxItems") not in (0, 1):
                reading.note(path, key)
        elif key == "unevaluatedProperties" and value is False and single and not {*LISTS, "$ref"} & part.keys():
            part.setdefault("additionalProperties", part.pop(key))
        elif key == "propertyNames" and single and _name_properties(document, path, part, reading):
            del part[key]
        else:
            reading.cannot(path, key, f"{key} is not implemented")
            del part[key]
    if not isinstance(name := part.get("format"), str) or name in FORMATS and not OURS.fullmatch(name):
        return
    del part["format"]
    if name not in FORMATS:
        reading.note(path, f"format {name}")
    elif "pattern" not in part:
        part["pattern"] = f"^({FORMATS[name]})$"
    elif isinstance(others := part.get("allOf", []), list):
        part["allOf"] = [*others, {"pattern": f"^({FORMATS[name]})$"}]


def _name_properties(document: SchemaDocument, path: str, part: Part, reading: Reading) -> bool:
    """Rewrite `propertyNames` as properties or as a pattern. Return False if that is not possible."""
    names, extra = part["propertyNames"], part.get("additionalProperties", True)
    if isinstance(names, dict) and "$ref" in names:
        names = next((target for _, target in document.targets(names)), None)
    if not isinstance(names, dict) or any(part.get(key) for key in MAPS) or {*LISTS, "$ref", *UNHELD} & names.keys():
        return False
    kinds = NAMES & names.keys()
    if kinds == {"format"} and names["format"] in FORMATS:
        names, kinds = {"pattern": f"^({FORMATS[names['format']]})$"}, {"pattern"}
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


def _one_of(path: str, part: Part, reading: Reading, clash: tuple[int, ...] | None) -> None:
    """Rewrite `oneOf` as `anyOf`, which is equivalent for alternatives that exclude each other."""
    if clash or clash is not None and reading.lenient:
        which = " and ".join(map(str, clash))
        reading.cannot(
            path,
            "oneOf",
            f"oneOf: {which} may both hold of a value (write anyOf, or give them a required "
            "property with different constants)",
        )
    if clash != () and "anyOf" not in part:
        part["anyOf"] = part.pop("oneOf")


def _closes(part: Part) -> bool:
    """Return True for an object schema with properties that does not mention other properties."""
    named, required, patterns = part.get("properties", {}), part.get("required", []), part.get("patternProperties")
    return (
        isinstance(named, dict)
        and isinstance(required, list)
        and bool(named or patterns)
        and not {*DATA, "additionalProperties"} & part.keys()
        and all(name in named for name in required)
    )


def _close(path: str, part: Part, reading: Reading, single: bool) -> None:
    """Forbid further properties where the schema does not mention them: they could repeat a name without end."""
    patterns = part.get("patternProperties")
    named, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return
    optional = sum(name not in required for name in named)
    reading.optional += optional
    reading.patterns |= bool(patterns)
    if optional > MOST_OPTIONAL:
        raise refusal(
            path,
            f"{optional} of its properties may be left out, at most {MOST_OPTIONAL} may: require "
            "some, or nest them in objects",
        )
    if single and _closes(part):
        part["additionalProperties"] = False
    _count_properties(path, part, reading, single)
    free = part.get("additionalProperties") is not False
    reading.listed |= bool((named or required) and (free or patterns) or patterns and free)


def _count_properties(path: str, part: Part, reading: Reading, single: bool) -> None:
    """Rewrite minProperties and maxProperties as required names, if possible; otherwise refuse or note them."""
    named, required = part.get("properties") or {}, part.get("required") or []
    closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    least, most = part.get("minProperties"), part.get("maxProperties")
    if isinstance(least, int) and least <= len(required):
        del part["minProperties"]
    elif least == 1 and closed and single and named and "anyOf" not in part and len(named) <= MOST_NAMED:
        part["anyOf"] = [{"required": [name]} for name in named]
        del part["minProperties"]
    elif isinstance(least, int) and least > 1:
        reading.cannot(
            path,
            "minProperties",
            f"minProperties: {least} are more than are required and may be one name "
            "that is written twice (require names instead)",
        )
        del part["minProperties"]
    if isinstance(most, int) and closed and most >= len(named):
        del part["maxProperties"]
    if {"minProperties", "maxProperties"} & part.keys() and len(named) > len(required):
        for key in {"minProperties", "maxProperties"} & part.keys():
            reading.cannot(path, key, f"{key} is not implemented beside properties that may be left out")
            del part[key]


def _check_numbers(path: str, part: Part) -> None:
    for key in (*DATA, *BOUNDS):
        most, value = EXACT if key in BOUNDS else LONGEST, part.get(key)
        if isinstance(value, int | float) and abs(value) > EXACT and value * WIDEST.get(key, 0) > 0:
            part[key] = value = WIDEST[key]  # a range wider than llguidance supports, such as that of 64-bit integers
        numbers = _numbers(value) if key in DATA or isinstance(value, int | float) else ()
        if any(abs(number) > most for number in numbers):
            raise refusal(
                path,
                f"{key} has a number beyond ±{most}, which is not read exactly: give a smaller one, "
                "or a string with a pattern",
            )


def _numbers(value: Any) -> Iterator[int | float]:
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, int | float):
            yield node
        elif isinstance(node, list | dict):
            stack.extend(node.values() if isinstance(node, dict) else node)


def _pattern(path: str, pattern: str, reading: Reading) -> str:
    """Return a pattern that llguidance enforces.
    In llguidance, a negated class that contains all control characters also matches a quote or backslash that it
    excludes. So one control character is added to the excluded ones. A pattern that cannot be enforced becomes ""."""
    if not (fault := pattern_fault(pattern)):
        return CLASS.sub(lambda found: r"[^\x0b" + found[0][2:] if _leaks(found[0]) else found[0], pattern)
    reading.cannot(path, f"pattern {pattern}", f"pattern: {fault}")
    return ""


def pattern_fault(pattern: str) -> str:
    """Return the reason why a regex in a JSON schema cannot be enforced; "" if it can."""
    if len(pattern) > LONGEST_PATTERN:
        return f"it has {len(pattern)} characters, at most {LONGEST_PATTERN} are taken"
    outside = CLASS.sub(lambda each: each[0] if LOOKS.match(each[0]) else " ", pattern)
    if found := LOOKS.search(outside):
        return f"{found[0]} (a look-around, a back reference or of another dialect) is not implemented"
    return next(filter(None, map(_leak, CLASS.findall(pattern))), "")


def _leaks(chars: str) -> bool:
    try:
        known = re.compile(chars)
    except re.error:  # Rust's syntax: assume that a quote or backslash in it is excluded
        return chars[:2] == "[^" and ('"' in chars or r"\\" in chars)
    return chars[0] == "[" and all(map(known.match, CONTROLS)) and not (known.match('"') and known.match("\\"))


def _leak(chars: str) -> str:
    """Return the reason why a character class cannot be rewritten; "" if it can, or need not be."""
    if not _leaks(chars) or chars[:2] == "[^" and chars[:3] != "[^]":
        return ""
    return f"{chars} has control characters, and not both of quote and backslash"


def refusal(path: str, reason: str) -> InvalidParameter:
    """Return the error for a part of a schema that cannot be enforced. `path`: place of the part in the schema."""
    return InvalidParameter(
        f"structured_outputs: the grammar cannot be used: {_shown(path)}{reason}.", param="structured_outputs"
    )


def _shown(path: str) -> str:
    return f"{ascii(path)[1:-1][:LONGEST_PATH]}: " if path else ""

"""Grammars that force a model to write tool calls in its format, in llguidance's Lark syntax.

Knows how calls are written, and which parts of free text `tools` would take for a call.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from quire.answers.json_parts import LISTS, WHERE, SchemaDocument
from quire.answers.json_schema import UNHELD, UNHELD_HERE, pattern_fault
from quire.answers.text_formats import FORMATS, whole
from quire.answers.tool_values import STRING, branches, kinds_of
from quire.contracts.errors import InvalidParameter, shown
from quire.text.output_styles import OutputStyles
from quire.text.tool_formats import CALL_NUMBER, PLAIN, ToolFormat

# White space as models write it. Without this limit some models write nothing but white space.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
ANYTHING = "/(?s:.*)/"
MOST_REFERENCES = 8
SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
SLASH = re.compile(r"(\\.)|[/\n\r]", re.DOTALL)


def tool_grammar(
    styles: OutputStyles, tools: Sequence[Mapping[str, Any]], choice: str, *, parallel: bool, thinking: bool = False
) -> str:
    """Make the Lark grammar of answers that call `tools` (OpenAI's tool objects), in the model's format or in `PLAIN`.

    choice     "required": at least one call; a tool's name: one call of it; "auto": text, then calls if any
    parallel   True: several calls are allowed
    thinking   True: the prompt ends within reasoning, so the answer ends the reasoning before anything else
    Arguments must fit their schemas. Schema keywords that llguidance cannot enforce are an error if the tool is
    `strict`, else they are ignored. Raises `InvalidParameter` when `choice` names no tool.
    """
    fmt, reasoning = styles.tools or PLAIN, styles.reasoning
    wanted = [tool["function"] for tool in tools if choice in ("auto", "required", tool["function"]["name"])]
    if not wanted:
        raise InvalidParameter(
            f"tool_choice {shown(choice)} names none of the tools: name one of them.", param="tool_choice"
        )
    opening, _, _, _, join, closing = fmt.printed
    auto, numbers = choice == "auto", range(len(wanted))
    rules = [
        f"FREE: {_without(_starts(fmt, [function['name'] for function in wanted]))}",
        "call: " + " | ".join(f"call{at}" for at in numbers),
    ]
    for at, function in enumerate(wanted):
        head, tail = _call(fmt, function, f"tail{at}")
        rules += [f"call{at}: {_quoted(head)} tail{at}", *tail]
        rules += [f"text{at}[suffix={_quoted(opening + head)}]: FREE"] if auto else []
    first = " | ".join(f"text{at} tail{at}" for at in numbers) if auto else f"{_quoted(opening)} call"
    more = f"({_quoted(join)} call)*" if parallel and choice in ("auto", "required") else ""
    answer = f"{'FREE | ' if auto else ''}({first}) {more} {_quoted(closing)}"
    if reasoning:
        rules += [f"thought[suffix={_quoted(reasoning.end)}]: FREE", r"thoughts: thought /\n{0,2}/"]
        answer = f"{'thoughts' if thinking else f'({_quoted(reasoning.start)} thoughts)?'} ({answer})"
    return "\n".join([f"start: {answer}", *rules])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(parts: Sequence[str]) -> str:
    """Return a terminal for any text that contains none of these terminals."""
    return f"{ANYTHING} & ~({ANYTHING} ({' | '.join(parts)}) {ANYTHING})"


def _starts(fmt: ToolFormat, names: Sequence[str]) -> list[str]:
    """Return the terminals that begin a call in a text."""
    starts = [_quoted(tag) for tag in (*fmt.starts, *fmt.opens[: fmt.bare]) if len(tag) > 1]
    known = f"({' | '.join(map(_quoted, names))})"
    if fmt.syntax == "python":
        return [*starts, rf'"[" /\s*/ {known} /\s*/ "("']
    if fmt.bare and len(fmt.opens[0]) == 1:
        starts += [r'"{" /\s*"(arguments|parameters|id|type)"/', rf'"{{" /\s*"name"\s*:\s*"/ {known} "\""']
    return starts


def _call(fmt: ToolFormat, function: Mapping[str, Any], rule: str) -> tuple[str, list[str]]:
    """Return the text that begins a call of a function, and the rules for the rest of the call, `rule` first.
    The rest is an object of arguments, or the arguments one by one in the schema's order (in Python's format the
    required ones first)."""
    _, before, between, after, _, _ = fmt.printed
    root, shared = arguments_schema(function, resolved=bool(fmt.key or fmt.syntax))
    properties = root.get("properties") or {}
    if not fmt.key and not (fmt.syntax and all(key.isidentifier() and not iskeyword(key) for key in properties)):
        if fmt.syntax:  # with names that cannot be bare: one object
            between, after = ("(**", ")") if fmt.syntax == "python" else ("", after.removeprefix(fmt.end))
        number = ""
        if CALL_NUMBER in fmt.between:  # any number, since calls of earlier turns count, too
            between, number = CALL_NUMBER, f"/[0-9]{{1,3}}/ {_quoted(fmt.between[0])} "
        shown = _quoted(function["name"]) if before.endswith(": ") else function["name"]
        return before + shown + between, [
            f"{rule}: {number}{rule}_ {_quoted(after)}",
            json_rule(f"{rule}_", root, shared),
        ]
    items, rules = _one_by_one(fmt, root, shared, rule)
    return before + function["name"] + between, [f"{rule}: {items} {_quoted(after)}", *rules]


def arguments_schema(function: Mapping[str, Any], *, resolved: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema of a function's arguments, and the keywords that each of its parts needs to stand alone:
    definitions, the layout of JSON, and the name for error messages. `resolved`: without a $ref at the root."""
    root = {**(function.get("parameters") or {"additionalProperties": False}), "type": "object"}
    root = _resolved(root) if resolved else root
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions", "components", "$id") if key in root}
    own = root.get("x-guidance")
    lenient = not function.get("strict") or isinstance(own, dict) and bool(own.get("lenient"))
    shared["x-guidance"] = {**LAYOUT, "lenient": True} if lenient else LAYOUT
    shared[WHERE] = f"{function['name']}.parameters"
    return root, shared


def json_rule(rule: str, schema: Any, shared: dict[str, Any]) -> str:
    """Return a rule for JSON that fits a schema. `shared`: further keywords of the schema."""
    return f"{rule}: %json {_plus(schema, shared)}"


def _one_by_one(fmt: ToolFormat, root: dict[str, Any], shared: dict[str, Any], rule: str) -> tuple[str, list[str]]:
    """Return the expression for arguments that are not written as a JSON object, and its rules."""
    properties = {key: each for key, each in (root.get("properties") or {}).items() if each is not False}
    required = root.get("required") or []
    least, most = root.get("minProperties", 0), root.get("maxProperties")
    unheld = [key for key in (*LISTS, "$ref") if root.get(key)]
    unheld += [f"required {name}" for name in required if name not in properties]
    unheld += ["minProperties"] * (isinstance(least, int) and least > max(1, len(required)))
    unheld += ["maxProperties"] * (isinstance(most, int) and most < len(properties))
    asked = {key: root[key] for key in root if key in UNHELD} | {UNHELD_HERE: unheld}
    rules = [f"{rule}_check: %json {_plus(asked, shared)}"] if unheld or len(asked) > 1 else []
    must: list[str] = []
    may: list[str] = []
    for at, (key, schema) in enumerate(properties.items()):
        (must if key in required else may).append(f"{rule}_{at}")
        known = shared | {WHERE: f"{shared[WHERE]}.properties.{key}"}
        rules += (
            _tagged(fmt, key, schema, known, f"{rule}_{at}")
            if fmt.key_ends
            else [f"{rule}_{at}: {_quoted(key + '=')} {rule}_{at}_v", f"{rule}_{at}_v: %json {_plus(schema, known)}"]
        )
    names = [f"{rule}_{at}" for at in range(len(properties))] if fmt.key else must + may
    join = "" if fmt.key else '"," ' if fmt.syntax == "quoted" else '", " '
    rest = [f"{rule}_from{at}" for at in range(len(names))] + [""]
    rules += [
        f"{rest[at]}: ({join}{names[at]}){'' if names[at] in must else '?'} {rest[at + 1]}"
        for at in range(1, len(names))
    ]
    first = next((at for at, name in enumerate(names) if name in must), len(names) - 1)
    items = " | ".join(f"{names[at]} {rest[at + 1]}" for at in range(first + 1))
    return f"({items}){'' if must or least else '?'}" if items else "", rules


def _resolved(root: dict[str, Any]) -> dict[str, Any]:
    """Return the root schema with its $ref replaced by the target, if it has no properties of its own."""
    seen = 0
    while "$ref" in root and not root.get("properties") and seen < MOST_REFERENCES:
        targets = [target for _, target in SchemaDocument(root).targets(root) if isinstance(target, dict)]
        if len(targets) != 1:
            break
        root, seen = {**{key: each for key, each in root.items() if key != "$ref"}, **targets[0]}, seen + 1
    return root


def _plus(schema: Any, shared: dict[str, Any]) -> str:
    return json.dumps({**(schema if isinstance(schema, dict) else {}), **shared})


def _tagged(fmt: ToolFormat, key: str, schema: Any, shared: dict[str, Any], rule: str) -> list[str]:
    """Return the rules of an argument in tags. A string has no quotes and contains no end tag; other values are JSON.
    The rules `..._check` are never used in a text. They only make llguidance read their schemas, so that keywords that
    cannot be enforced are reported as for JSON."""
    rules, ways, end, quoted = [], [], _quoted(fmt.value_ends[0]), fmt.syntax == "quoted"
    listed = next((each for each in ("anyOf", "oneOf") if isinstance(schema, dict) and schema.get(each)), None)
    for at, part in enumerate(branches(schema)):
        bare, name = kinds_of(part) == STRING, f"{rule}_{at}"
        key_end = fmt.key_ends[-1 if not bare and (quoted or "string=" in fmt.key_ends[-1]) else 0]
        body = name if quoted and not bare else f"{name} {end}"
        known = shared | {WHERE: f"{shared[WHERE]}.{listed}.{at}"} if listed else shared
        if bare and ("enum" in part or "const" in part):
            words = " | ".join(map(_quoted, _listed(part)))
            rules.append(f"{name}: {words or '%json ' + _plus(part, known)}")  # without a word JSON says what is wrong
        elif bare:
            body, texts, unheld = name, _bare(part), [each for each in (*LISTS, "$ref") if each in part]
            unheld += ["pattern"] * (None in texts)
            tagless = _without([*map(_quoted, fmt.value_ends[-2:])])
            rules += [
                f"{name}[suffix={end}]: {name.upper()}",
                f"{name.upper()}: {' & '.join([*map(terminal, filter(None, texts)), tagless])}",
            ]
            rules.append(f"{name}_check: %json {_plus({**part, UNHELD_HERE: unheld}, known)}")
        else:
            rules.append(f"{name}: %json {_plus(part, known)}")
        ways.append(f"{_quoted(fmt.key + key + key_end + fmt.value)} {body}" + ("" if quoted else r" /\n?/"))
    rules += [f"{rule}_check: %json {_plus(schema, shared)}"] if listed == "oneOf" else []
    return [f"{rule}: {' | '.join(ways)}", *rules]


def _listed(part: Mapping[str, Any]) -> list[str]:
    """Return the strings of `enum` and `const` that the schema's other keywords about lengths and values allow."""
    found = part.get("enum", [part.get("const")])
    least, most = part.get("minLength", 0), part.get("maxLength", math.inf)
    return [
        word
        for word in found
        if isinstance(word, str) and word == part.get("const", word) and least <= len(word) <= most
    ]


def _bare(part: Mapping[str, Any]) -> list[str | None]:
    """Return regular expressions that a string without quotes must all match. None = one that cannot be written."""
    length = f"(?s:.{{{part.get('minLength', 0)},{part.get('maxLength', '')}}})"
    texts: list[str | None] = [length]
    if isinstance(pattern := part.get("pattern"), str) and not pattern_fault(pattern):
        texts.append(whole(pattern))
    return [*texts, FORMATS[part["format"]]] if part.get("format") in FORMATS else texts


def terminal(text: str) -> str:
    """Return a regular expression as a terminal of a Lark grammar."""
    return "/" + SLASH.sub(lambda found: found[1] or SLASHES[found[0]], text) + "/"

"""A grammar that holds a model to its format of calls, in Lark's syntax as llguidance reads it.

Knows how calls are printed, and what of a free text `tools` would take for a call.
"""

import json
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from quire.contracts.errors import InvalidParameter, shown
from quire.text.json_schema import WHERE
from quire.text.tool_formats import PLAIN, OutputStyles, ToolFormat
from quire.text.tool_values import STRING, branches, kinds_of

# White space as models write it: without a bound some write nothing else.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
ANYTHING = "/(?s:.*)/"


def tool_grammar(styles: OutputStyles, tools: Sequence[Mapping[str, Any]], choice: str, *, parallel: bool,
                 thinking: bool = False) -> str:
    """A grammar of answers that call `tools` (OpenAI's objects) in the model's format, or in `plain`.

    choice     "required": one or more calls, one if not `parallel`; a tool's name: one call of it; "auto": text, calls
    thinking   the answer begins within reasoning, which ends first; if not, it may begin with some
    Arguments obey their schemas. What llguidance does not know of one is an error there if the tool is `strict`, else
    left out. Errors: `InvalidParameter` when `choice` names no tool, or for what a bare string cannot be held to.
    """
    form, reasoning = styles.tools or PLAIN, styles.reasoning
    wanted = [tool["function"] for tool in tools if choice in ("auto", "required", tool["function"]["name"])]
    if not wanted:
        raise InvalidParameter(f"tool_choice {shown(choice)} names none of the tools.", param="tool_choice")
    opening, _, _, _, join, closing = form.printed
    auto, numbers = choice == "auto", range(len(wanted))
    rules = [f"FREE: {_without(_starts(form, [function['name'] for function in wanted]))}",
             "call: " + " | ".join(f"call{at}" for at in numbers)]
    for at, function in enumerate(wanted):
        head, tail = _call(form, function, f"tail{at}")
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
    """A terminal: any text that holds none of these terminals."""
    return f"{ANYTHING} & ~({ANYTHING} ({' | '.join(parts)}) {ANYTHING})"


def _starts(form: ToolFormat, names: Sequence[str]) -> list[str]:
    """Terminals of what begins a call in a text."""
    starts = [_quoted(tag) for tag in (*form.starts, *form.opens[: form.bare]) if len(tag) > 1]
    known = f"({' | '.join(map(_quoted, names))})"
    if form.python:
        return [*starts, rf'"[" /\s*/ {known} /\s*/ "("']
    if form.bare and len(form.opens[0]) == 1:
        starts += [r'"{" /\s*"(arguments|parameters|id|type)"/', rf'"{{" /\s*"name"\s*:\s*"/ {known} "\""']
    return starts


def _call(form: ToolFormat, function: Mapping[str, Any], rule: str) -> tuple[str, list[str]]:
    """How calls of a function begin, and the rules, `rule` first, of the rest: an object of arguments, or these one by
    one, in the schema's order (in Python's form the required first)."""
    _, before, between, after, _, _ = form.printed
    root = {**(function.get("parameters") or {"additionalProperties": False}), "type": "object"}
    properties, required = root.get("properties") or {}, root.get("required") or []
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    own = root.get("x-guidance")
    lenient = not function.get("strict") or isinstance(own, dict) and bool(own.get("lenient"))
    shared["x-guidance"] = {**LAYOUT, "lenient": True} if lenient else LAYOUT
    shared[WHERE] = f"{function['name']}.parameters"
    if not form.key and not (form.python and all(key.isidentifier() and not iskeyword(key) for key in properties)):
        between, after = ("(**", ")") if form.python else (between, after)
        shown = _quoted(function["name"]) if before.endswith(": ") else function["name"]
        return before + shown + between, [f"{rule}: {rule}_ {_quoted(after)}", f"{rule}_: %json {_plus(root, shared)}"]
    rules: list[str] = []
    must: list[str] = []
    may: list[str] = []
    for at, (key, schema) in enumerate(properties.items()):
        (must if key in required else may).append(f"{rule}_{at}")
        known = shared | {WHERE: f"{shared[WHERE]}.properties.{key}"}
        rules += _tagged(form, key, schema, known, f"{rule}_{at}") if form.key else [
            f"{rule}_{at}: {_quoted(key + '=')} {rule}_{at}_v", f"{rule}_{at}_v: %json {_plus(schema, known)}"]
    if form.key:
        items = " ".join(f"{rule}_{at}{'' if key in required else '?'}" for at, key in enumerate(properties))
    else:  # a comma before each but the first
        rows = [must + may] if must else [may[at:] for at in range(len(may))]
        items = " | ".join(" ".join([row[0], *(f'(", " {one}){"" if one in must else "?"}' for one in row[1:])])
                           for row in rows)
        items = f"({items}){'' if must else '?'}" if items else ""
    return before + function["name"] + between, [f"{rule}: {items} {_quoted(after)}", *rules]


def _plus(schema: Any, shared: Mapping[str, Any]) -> str:
    return json.dumps({**(schema if isinstance(schema, dict) else {}), **shared})


def _tagged(form: ToolFormat, key: str, schema: Any, shared: Mapping[str, Any], rule: str) -> list[str]:
    """The rules of an argument in tags: a string is bare and holds no tag that would end it, the rest is JSON."""
    rules, ways, end = [], [], _quoted(form.value_ends[0])
    for at, part in enumerate(branches(schema)):
        bare, name = kinds_of(part) == STRING, f"{rule}_{at}"
        key_end = form.key_ends[-1 if not bare and "string=" in form.key_ends[-1] else 0]
        body = f"{name} {end}"
        if bare and ("enum" in part or "const" in part):
            rules.append(f"{name}: {' | '.join(_quoted(str(word)) for word in part.get('enum') or [part['const']])}")
        elif bare:
            if {"pattern", "format"} & part.keys() and "lenient" not in shared["x-guidance"]:
                raise InvalidParameter(f"{shown(key)}: this model writes strings bare, which cannot be held to a "
                                       "pattern or a format: send neither, or the tool without strict.", param="tools")
            length = f"/(?s:.{{{part.get('minLength', 0)},{part.get('maxLength', '')}}})/"
            body = name
            rules += [f"{name}[suffix={end}]: {name.upper()}",
                      f"{name.upper()}: {length} & {_without([*map(_quoted, form.value_ends[-2:])])}"]
        else:
            rules.append(f"{name}: %json {_plus(part, shared)}")
        ways.append(rf"{_quoted(form.key + key + key_end + form.value)} {body} /\n?/")
    return [f"{rule}: {' | '.join(ways)}", *rules]

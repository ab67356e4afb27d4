"""The way of an option's value: `quire trace --from flag -q fp8`. No torch.

Where it was given, the field that keeps it, the functions that read it (found in the source), and what it changes in
the plan beside a run without it, down to the kernels.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig, flat_names
from quire.config.flags import flag_names
from quire.config.sources import Settings
from quire.contracts.errors import ConfigError
from quire.explain.describe import plan_engine
from quire.explain.differences import Change, differences
from quire.observe.calls import PACKAGE
from quire.platforms.cpu import read_cpu_facts

DEFINED = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)


class FlagReader(NamedTuple):
    """A function that reads an option. line: its source, as it stands"""

    function: str
    where: str
    line: str


class FlagWay(NamedTuple):
    """The way of an option.

    flags     its spellings
    origin    where the value was given
    field     class, type and default of the field, with its place
    changes   of the plan, see `differences`
    """

    name: str
    value: Any
    flags: tuple[str, ...]
    origin: str
    field: str
    readers: tuple[FlagReader, ...]
    changes: tuple[Change, ...]


def given_flag_lines(settings: Settings, config: EngineConfig) -> Iterator[str]:
    """Yield the way of each given option of the engine, as lines. Raises `ConfigError` when none is given."""
    names = [name for name in settings.values if name in flat_names() and name != "model"]
    if not names:
        raise ConfigError("--from flag shows the way of flags that are given: add one, such as --quantization fp8.")
    for name in names:
        yield from flag_lines(flag_way(config, name, settings.origins[name]))


def flag_way(config: EngineConfig, name: str, origin: str, described: str = "") -> FlagWay:
    """Return the way of the option `name` of a configuration. described: see `plan_engine`"""
    part = flat_names()[name]
    record = getattr(config, part)
    option = next(one for one in fields(record) if one.name == name)
    plain = replace(config, **{part: replace(record, **{name: option.default})})
    facts = read_cpu_facts()
    before, after = (plan_engine(one, described, facts=facts).describe() for one in (plain, config))
    kind = type(record)
    words = f"{kind.__name__}.{name}: {option.type}, default {option.default!r}  {_place(kind, name)}"
    value, found = getattr(record, name), tuple(readers(part, kind.__name__, name))
    return FlagWay(name, value, flag_names(option), origin, words, found, tuple(differences(before, after)))


def readers(part: str, kind: str, name: str) -> Iterator[FlagReader]:
    """Yield the functions of the package that read the option `name` of the record `kind`, kept in fields `part`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not re.search(rf"\.{name}\b", text):
            continue
        lines = text.splitlines()
        for function, line in sorted(set(_reads(ast.parse(text), part, kind, name)), key=lambda one: one[1]):
            yield FlagReader(function, f"{path.relative_to(PACKAGE)}:{line}", lines[line - 1].strip())


def _reads(tree: ast.AST, part: str, kind: str, name: str, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        own = (
            (*inside, node.name) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) else inside
        )
        if isinstance(node, ast.Attribute) and node.attr == name:
            owner = node.value
            named = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if named == part or (named in ("self", "config") and kind in inside):
                yield ".".join(own) or "module", node.lineno
        yield from _reads(node, part, kind, name, own)


def _place(kind: type, name: str) -> str:
    lines, first = inspect.getsourcelines(kind)
    at = next(i for i, line in enumerate(lines) if re.match(rf"    {name}:", line))
    return f"{Path(inspect.getfile(kind)).relative_to(PACKAGE)}:{first + at}"


def flag_lines(way: FlagWay) -> Iterator[str]:
    """Yield the way of an option as lines."""
    yield f"{way.flags[0]} = {way.value!r}, from {way.origin}"
    others = f"also {', '.join(way.flags[1:])}; " if way.flags[1:] else ""
    yield f"  {others}environment QUIRE_{way.name.upper()}, then a --config file  config/sources.py"
    yield f"  kept in {way.field}"
    yield f"  read by {len(way.readers)} line{'s' * (len(way.readers) != 1)} of the package:"
    yield from (f"    {one.where}  {one.function}: {one.line}" for one in way.readers)
    if not way.changes:
        yield "  changes nothing in the plan of this model here"
        return
    yield "  changes in the plan, beside the default:"
    yield from (f"    {path}: {one} -> {other}" for path, one, other in way.changes)

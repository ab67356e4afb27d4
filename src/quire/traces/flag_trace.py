"""The way of an option's value: `quire trace --from flag -q fp8`. No torch.

Where it was given, the field that keeps it, the functions that read it and what they make of it (found in the source),
what it changes in the plan beside a run without it, and the functions of kernels that run for it, with the layers that
call them.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import fields, replace
from functools import cache
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

STAGES = ("convert", "pack", "run")  # functions that a weight passes
RUNNING = ("engine", "kv", "worker", "layers", "spec")  # rooms that run in steps
SHOWING = ("explain", "reports", "traces", "tour")  # rooms that tell of an engine
DEFINED = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)


class FlagReader(NamedTuple):
    """A function that reads an option, or what another reader made of it. line: its source, as it stands

    depth   0: it reads the option itself; n: what a reader of depth n - 1 returns or keeps in its object
    """

    function: str
    where: str
    line: str
    depth: int = 0


class FlagUse(NamedTuple):
    """A function that runs because of an option. callers: functions of layers that call it"""

    function: str
    where: str
    callers: tuple[str, ...]


class FlagWay(NamedTuple):
    """The way of an option.

    flags     its spellings
    origin    where the value was given
    field     class, type and default of the field, with its place
    changes   of the plan, see `differences`
    uses      functions of kernels in the plan that a run without the option has not
    """

    name: str
    value: Any
    flags: tuple[str, ...]
    origin: str
    field: str
    readers: tuple[FlagReader, ...]
    changes: tuple[Change, ...]
    uses: tuple[FlagUse, ...]


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
    typed = getattr(option.type, "__name__", option.type)
    words = f"{kind.__name__}.{name}: {typed}, default {option.default!r}  {_place(kind, name)}"
    found, changes = tuple(readers(part, kind.__name__, name)), tuple(differences(before, after))
    uses = tuple(_uses(before, after))
    return FlagWay(name, getattr(record, name), flag_names(option), origin, words, found, changes, uses)


def readers(part: str, kind: str, name: str) -> Iterator[FlagReader]:
    """Yield the functions of the package that read the option `name` of the record `kind`, kept in fields `part`.

    Behind a method of the record come the functions that call it, those of a running engine first. Behind a function
    that keeps a value in its object come the methods that read it there, and those that call these.
    """
    yield from _read(part, kind, name, 0, frozenset())


def _read(part: str, kind: str, name: str, depth: int, seen: Set[str]) -> Iterator[FlagReader]:
    found = list[tuple[Path, ast.AST, str, int]]()
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (_room(path) not in RUNNING, path)):
        if (not depth or _room(path) not in SHOWING) and re.search(rf"\.{name}\b", _text(path)):
            module = _tree(path)
            found += [(path, module, *one) for one in _once(_reads(module, part, kind, name), depth)]
    methods = {function.rpartition(".")[2] for *_, function, _ in found if function.rpartition(".")[0] == kind}
    for path, tree, function, line in found:
        yield _reader(path, function, line, depth)
        owner, _, method = function.rpartition(".")
        if owner == kind and method not in seen:
            yield from _read(part, kind, method, depth + 1, seen | methods)
        for kept in _kept(tree, line, name):
            yield from _read_kept(path, tree, owner, kept, depth + 1)


def _read_kept(path: Path, tree: ast.AST, owner: str, name: str, depth: int) -> Iterator[FlagReader]:
    for function, line in _once(_reads(tree, "", owner, name), depth):
        yield _reader(path, function, line, depth)
        calling = _once(_reads(tree, "", owner, function.rpartition(".")[2]), depth)
        yield from (_reader(path, *call, depth + 1) for call in calling)


def _once(found: Iterable[tuple[str, int]], depth: int) -> list[tuple[str, int]]:
    """Return (function, line) pairs in order; behind the readers of the option itself the first of each function."""
    every = sorted(set(found), key=lambda one: one[1])
    first = {function: (function, line) for function, line in reversed(every)}
    return sorted(first.values(), key=lambda one: one[1]) if depth else every


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _reader(path: Path, function: str, line: int, depth: int) -> FlagReader:
    source = _text(path).splitlines()[line - 1].strip()
    return FlagReader(function, f"{path.relative_to(PACKAGE)}:{line}", source, depth)


def _kept(tree: ast.AST, line: int, name: str) -> Iterator[str]:
    """Yield the attributes of `self` that a line sets to a value with the attribute `name` in it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not node.lineno <= line <= (node.end_lineno or line):
            continue
        for to, given in _pairs(node):
            own = isinstance(to, ast.Attribute) and isinstance(to.value, ast.Name) and to.value.id == "self"
            if own and any(isinstance(one, ast.Attribute) and one.attr == name for one in ast.walk(given)):
                assert isinstance(to, ast.Attribute)
                yield to.attr


def _reads(
    tree: ast.AST, part: str, kind: str, name: str, inside: tuple[str, ...] = (), owners: Set[str] = frozenset()
) -> Iterator[tuple[str, int]]:
    """Yield (function, line) of the reads of an attribute of a record. owners: names that stand for the record"""
    for node in ast.iter_child_nodes(tree):
        own, known = inside, owners
        if isinstance(node, DEFINED):
            own, known = (*inside, node.name), owners | set(_standing(node, part, kind))
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
            owner = node.value
            named = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if named in known or (named == "self" and kind in inside) or _is_field(owner, part, kind):
                yield ".".join(own) or "module", node.lineno
        yield from _reads(node, part, kind, name, own, known)


def _standing(node: ast.AST, part: str, kind: str) -> Iterator[str]:
    """Yield the parameters and names of a function that are the record: by their annotation, or set to a field."""
    for one in ast.walk(node):
        if isinstance(one, ast.arg) and one.annotation is not None and kind in ast.unparse(one.annotation).split(" | "):
            yield one.arg
        if isinstance(one, ast.Assign):
            yield from (to.id for to, given in _pairs(one) if isinstance(to, ast.Name) and _is_field(given, part, kind))


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Return what an assignment sets, each with its value."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _is_field(node: ast.AST, part: str, kind: str) -> bool:
    """Return True for `part`; of a record `kind` only for the field of a configuration: a plan, too, has the name."""
    if not kind:
        return part in (getattr(node, "attr", ""), getattr(node, "id", ""))
    return isinstance(node, ast.Attribute) and node.attr == part and "config" in ast.unparse(node.value)


def _functions(plan: dict[str, Any]) -> dict[tuple[str, str], None]:
    """Return the full names of the functions of kernels in a plan, in order, each with the numbers that it reads."""
    found = dict[tuple[str, str], None]()
    for layer in plan["layers"]:
        for weight in layer["weights"]:
            found |= dict.fromkeys((weight[stage], weight["dtype"]) for stage in STAGES if weight[stage])
        found |= dict.fromkeys((call["function"], "") for call in layer["calls"])
    return found


def _uses(before: dict[str, Any], after: dict[str, Any]) -> Iterator[FlagUse]:
    known = _functions(before)
    for function in dict.fromkeys(name for name, numbers in _functions(after) if (name, numbers) not in known):
        module, _, name = function.rpartition(".")
        file = PACKAGE / f"{module.removeprefix('quire.').replace('.', '/')}.py"
        if file.exists():
            (line, *_) = [*_lines_of(_tree(file), name), 1]
            operation = function.split(".")[2]
            yield FlagUse(function, f"{file.relative_to(PACKAGE)}:{line}", tuple(_callers(operation, name)))


def _lines_of(tree: ast.Module, name: str) -> Iterator[int]:
    """Yield the line where a module defines or imports a name."""
    for node in tree.body:
        names = [one.asname or one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if (isinstance(node, DEFINED) and node.name == name) or name in names:
            yield node.lineno


def _callers(operation: str, name: str) -> Iterator[str]:
    """Yield the functions of layers that call a function of an operation's kernel, with file and line."""
    for path in sorted((PACKAGE / "layers").glob("*.py")):
        own = {
            operation,
            *["kernel"] * (path.stem.startswith(operation) or (operation, path.stem) == ("experts", "moe")),
        }
        for owner in own:
            for function, line in sorted(set(_reads(_tree(path), owner, "", name)), key=lambda one: one[1]):
                yield f"{function} ({path.relative_to(PACKAGE)}:{line})"


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
    direct = sum(not one.depth for one in way.readers)
    others = f"; {len(way.readers) - direct} read what these make of it" * (len(way.readers) > direct)
    yield f"  read by {direct} line{'s' * (direct != 1)} of the package{others}:"
    yield from (f"    {'  ' * one.depth}{one.where}  {one.function}: {one.line}" for one in way.readers)
    if not way.changes:
        yield "  changes nothing in the plan of this model here"
        return
    yield "  changes in the plan, beside the default:"
    yield from (f"    {path}: {one} -> {other}" for path, one, other in way.changes)
    if way.uses:
        yield "  so these functions of kernels run, or read other numbers:"
    for use in way.uses:
        callers = f", called by {', '.join(use.callers)}" * bool(use.callers)
        yield f"    {use.where}  {use.function}{callers}"

"""Options of engines and replaced names in tests/gpu exist.

CI cannot run the tests of that folder, and mypy sees neither the keys of their dicts nor names in strings.
"""

import ast
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.config.engine import EngineConfig, check_types, flat_names

KNOWN = flat_names().keys()
FILES = sorted((Path(__file__).parents[2] / "gpu").glob("*.py"))
ENGINES = {"LLM", "make", "engine"}  # functions that take the options of an engine
TABLES = {"options", "sizes"}  # arguments of parametrized tests that are dicts of options
OTHERS = {"k", "num_speculative_tokens_per_batch_size"}  # keys of `speculative_config` in such dicts


def module_of(file: Path) -> ModuleType:
    return importlib.import_module(f"...gpu.{file.stem}", __package__)


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of functions and methods with these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in names:
                yield node


def written(tree: ast.AST) -> Iterator[str]:
    """Yield the options that calls name."""
    for call in calls(tree, *ENGINES):
        yield from (keyword.arg for keyword in call.keywords if keyword.arg is not None)


def unpacked(tree: ast.AST) -> set[str]:
    """Return the names of the dicts that calls unpack."""
    given = [keyword.value for call in calls(tree, *ENGINES) for keyword in call.keywords if keyword.arg is None]
    return {node.id for value in given for node in ast.walk(value) if isinstance(node, ast.Name)}


def dicts_in(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield a dict of options, or those in a table of them."""
    if (
        isinstance(value, Mapping)
        and not value.keys() & KNOWN
        and all(isinstance(one, Mapping) for one in value.values())
    ):
        for one in value.values():
            yield from dicts_in(one)
    elif isinstance(value, Mapping):
        yield value
    elif isinstance(value, (list, tuple)):  # rows of a parametrized test, some with ids and marks
        for one in value:
            yield from dicts_in(one)


def parametrized(module: ModuleType) -> Iterator[Mapping[str, Any]]:
    """Yield the dicts of options with which tests are parametrized."""
    for test in vars(module).values():
        for mark in getattr(test, "pytestmark", ()):
            if mark.name != "parametrize":
                continue
            names = (
                [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            )
            for row in mark.args[1]:
                values = (row,) if len(names) == 1 and not hasattr(row, "values") else getattr(row, "values", row)
                values = (row,) if isinstance(row, Mapping) else values
                for name, value in zip(names, values, strict=True):
                    if name in TABLES:
                        yield from dicts_in(value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_options_of_engines_exist(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert set(written(tree)) <= KNOWN
    if not (names := unpacked(tree)):
        return
    module = module_of(file)
    constants = [getattr(module, name) for name in sorted(names) if hasattr(module, name)]
    found = [one for value in constants for one in dicts_in(value)] + list(parametrized(module))
    for options in found:
        own = {name: value for name, value in options.items() if name not in OTHERS}
        assert own.keys() <= KNOWN, own
        config = EngineConfig.from_flat(**own)
        for part in fields(config):
            check_types(getattr(config, part.name))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_replaced_names_exist(file: Path) -> None:
    """Of `monkeypatch.setattr(MODULE, NAME, value)`, and of `patch.object`."""
    tree = ast.parse(file.read_text())
    places = {
        alias.asname or alias.name: (f"{node.module}.{alias.name}", node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.startswith("quire")
        for alias in node.names
    }
    for call in calls(tree, "setattr", "object"):
        owner, name = call.args[:2]
        if isinstance(owner, ast.Name) and owner.id in places and isinstance(name, ast.Constant):
            module = importlib.import_module(places[owner.id][0])
            assert hasattr(module, name.value), f"{module.__name__} has no {name.value}"

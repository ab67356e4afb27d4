"""pyproject.toml says what the code needs, and the wheel carries what the code reads."""

import ast
import re
import sys
import tomllib

import pytest

import quire
import rules

PROJECT = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())
IMPORT_NAMES = {"pyyaml": "yaml", "pyzmq": "zmq", "flash-attn-4": "flash_attn", "opentelemetry-sdk": "opentelemetry"}


def import_name(requirement: str) -> str:
    name = re.match(r"[\w-]+", requirement)
    assert name
    return IMPORT_NAMES.get(name.group(), name.group().replace("-", "_"))


def imported() -> set[str]:
    """Third-party modules the package imports, by their first name."""
    found = set()
    for source in rules.package_sources():
        for node in source.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"quire"}


def test_what_is_imported_is_declared() -> None:
    project = PROJECT["project"]
    declared = {import_name(r) for r in project["dependencies"]}
    declared |= {import_name(r) for extra in project["optional-dependencies"].values() for r in extra}
    assert imported() <= declared


def test_what_is_declared_is_imported() -> None:
    declared = {import_name(r) for r in PROJECT["project"]["dependencies"]}
    assert declared <= imported()


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == quire.__version__


def test_python_has_no_upper_bound() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_every_file_of_the_package_is_shipped() -> None:
    globs = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = set()
    for package, patterns in globs.items():
        folder = rules.ROOT / "src" / package.replace(".", "/")
        shipped |= {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    ours = {p for p in rules.PACKAGE.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts}
    assert ours - shipped == set()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "MODEL_CARD.md"])
def test_the_bundled_model_is_complete(name: str) -> None:
    from quire.config.bundled import bundled_model

    assert (bundled_model() / name).is_file()

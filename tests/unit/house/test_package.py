"""The package keeps its rules. There is no exception list: a rule that must give way changes for everyone."""

import subprocess
import sys

import pytest

import rules


@pytest.fixture(scope="module")
def sources() -> list[rules.Source]:
    return rules.package_sources()


@pytest.mark.parametrize("rule", rules.FILE_RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: rules.Rule, sources: list[rules.Source]) -> None:
    complaints = [complaint for source in sources for complaint in rule(source)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("folder", ["tests", "tools", "examples"])
def test_docstrings_beside_the_package_begin_with_the_thing(folder: str) -> None:
    paths = sorted((rules.ROOT / folder).rglob("*.py"))
    assert paths
    found = [rules.Source(path.relative_to(rules.ROOT).as_posix(), path.read_text()) for path in paths]
    complaints = [complaint for source in found for complaint in rules.docstring_beginnings(source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_rooms_have_no_cycles(sources: list[rules.Source]) -> None:
    assert rules.room_cycles(sources) == []


def test_no_modules_import_each_other(sources: list[rules.Source]) -> None:
    assert rules.module_cycles(sources) == []


def test_class_names_are_unique_across_rooms(sources: list[rules.Source]) -> None:
    found = rules.repeated_classes(sources)
    assert not found, "\n" + "\n".join(found)


def test_the_brain_never_reaches_torch(sources: list[rules.Source]) -> None:
    assert rules.brings_torch(sources, rules.TORCH_FREE_ROOMS) == []


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in rules.PACKAGE.rglob("*.py")}
    missing = [str(f.relative_to(rules.ROOT)) for f in folders if not (f / "__init__.py").is_file()]
    assert missing == [], "an installed wheel would lack these folders"


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=rules.ROOT / "src", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loads_torch(modules: list[str]) -> str:
    """True if importing these modules imports torch, or OpenTelemetry, which only servers with a collector need."""
    load = f"for name in {modules}: importlib.import_module(name)"
    found = "'torch' in sys.modules or 'opentelemetry' in sys.modules"
    return run_python(f"import importlib, sys\n{load}\nprint({found})").strip()


def test_importing_the_package_and_the_brain_leaves_torch_out(sources: list[rules.Source]) -> None:
    names = ["quire"] + [s.module for s in sources if s.room in rules.TORCH_FREE_ROOMS]
    assert loads_torch(names) == "False"


def test_the_http_front_end_leaves_torch_out(sources: list[rules.Source]) -> None:
    names = [s.module for s in sources if s.path.startswith("entry/http/")]
    if not names:
        pytest.skip("entry/http does not exist yet")
    assert loads_torch(names) == "False"


HELP = """
import runpy, sys
sys.argv = ["quire", "--help"]
try:
    runpy.run_module("quire", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert not stop.code, stop.code
print("torch loaded:", "torch" in sys.modules)
"""


def test_the_help_text_leaves_torch_out() -> None:
    if not (rules.PACKAGE / "entry" / "cli" / "main.py").is_file():
        pytest.skip("entry/cli does not exist yet")
    assert run_python(HELP).strip().endswith("torch loaded: False")

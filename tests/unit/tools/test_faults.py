"""Rows of tools/faults fit the tree, and the tool that plants faults tells apart all ways in which tests end."""

import os
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import plant_faults

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    (path.stem, fault)
    for path in sorted((ROOT / "tools" / "faults").glob("*.toml"))
    for fault in tomllib.loads(path.read_text())["fault"]
]


def test_every_row_stands_once_in_its_file() -> None:
    assert ROWS
    stale = [
        f"{area}: {fault['what']}"
        for area, fault in ROWS
        if (ROOT / fault["file"]).read_text().count(fault["old"]) != 1 or fault["old"] == fault["new"]
    ]
    assert not stale, "\n" + "\n".join(stale)


def test_every_row_names_tests_that_exist() -> None:
    lost = []
    for area, fault in ROWS:
        paths = [argument.partition("::")[0] for argument in fault["tests"] if argument.startswith("tests/")]
        names = [argument.split("::")[1:] for argument in fault["tests"] if "::" in argument]
        text = "".join((ROOT / path).read_text() for path in paths if (ROOT / path).is_file())
        known = all(f"def {parts[-1].partition('[')[0]}(" in text for parts in names)
        if not (paths and known and all((ROOT / path).exists() for path in paths)):
            lost.append(f"{area}: {fault['what']}: {fault['tests']}")
    assert not lost, "\n" + "\n".join(lost)


TESTS = """
import subprocess, sys, time
from part import VALUE
def test_value():
    if VALUE == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open("pid", "w").write(str(child.pid))
        time.sleep(60)
    assert VALUE != "wrong"
def test_red():
    assert False
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "part.py").write_text('VALUE = "right"\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("")
    (tmp_path / "tests" / "test_part.py").write_text(TESTS)
    return tmp_path


def fault(new: str, test: str = "test_value", old: str = '"right"') -> dict[str, Any]:
    return {"file": "src/part.py", "old": old, "new": new, "tests": [f"tests/test_part.py::{test}"]}


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (fault('"wrong"'), "seen"),
        (fault('"other"'), "MISSED"),
        (fault('"other"', old="absent"), "STALE"),
        (fault('"wrong"', test="test_red"), "RED BEFORE"),
        (fault('"wrong"', test="test_absent"), "RED BEFORE"),
        (fault('"other"\nimport absent'), "EXIT 4"),
    ],
)
def test_the_word_of_a_row(row: dict[str, Any], word: str, copy: Path) -> None:
    assert plant_faults.plant(copy, row, {}) == word
    assert (copy / "src" / "part.py").read_text() == 'VALUE = "right"\n'


def test_tests_run_once_without_a_fault(copy: Path) -> None:
    before: dict[tuple[str, ...], int] = {}
    assert plant_faults.plant(copy, fault('"wrong"'), before) == "seen"
    assert list(before.values()) == [0]
    (copy / "src" / "part.py").write_text('VALUE = "wrong", "right"\n')
    assert plant_faults.plant(copy, fault('"right"'), before) == "MISSED"
    assert len(before) == 1


def test_tests_that_hang_leave_no_process(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plant_faults.plant(copy, fault('"right"\n'), before := {}) == "MISSED"
    monkeypatch.setattr(plant_faults, "SECONDS", 5)
    assert plant_faults.plant(copy, fault('"hang"'), before) == "TIMEOUT"
    child = int((copy / "pid").read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(child, 9)
    raise AssertionError("a process of the tests is left")

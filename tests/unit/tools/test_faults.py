"""Rows of tools/faults fit the tree, and the tool that plants faults tells apart all ways in which tests end."""

import os
import signal
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


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "part.py").write_text('VALUE = "right"\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("")
    text = "from part import VALUE\ndef test_value():\n    assert VALUE == 'right'\n"
    (tmp_path / "tests" / "test_part.py").write_text(text)
    return tmp_path


def fault(old: str = "right") -> dict[str, Any]:
    return {"file": "src/part.py", "old": old, "new": "wrong", "tests": ["tests/test_part.py"]}


def test_a_fault_is_seen_by_tests_that_are_green_without_it(copy: Path) -> None:
    before: dict[tuple[str, ...], int] = {}
    assert plant_faults.plant(copy, fault(), before) == "seen"
    assert before == {("tests/test_part.py",): 0}
    assert (copy / "src" / "part.py").read_text() == 'VALUE = "right"\n'


@pytest.mark.parametrize(
    ("green", "planted", "word"),
    [
        (0, 1, "seen"),
        (0, 0, "MISSED"),
        (0, plant_faults.TIMEOUT, "TIMEOUT"),
        (0, 2, "EXIT 2"),
        (0, -9, "EXIT -9"),
        (1, 1, "RED BEFORE"),
        (5, 5, "RED BEFORE"),
        (plant_faults.TIMEOUT, plant_faults.TIMEOUT, "RED BEFORE"),
    ],
)
def test_the_word_of_a_row(green: int, planted: int, word: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []

    def run(copy: Path, tests: object, red: object = ()) -> int:
        texts.append((copy / "src" / "part.py").read_text())
        return planted if "wrong" in texts[-1] else green

    monkeypatch.setattr(plant_faults, "run", run)
    before: dict[tuple[str, ...], int] = {}
    assert [plant_faults.plant(copy, fault(), before) for _ in range(2)] == [word, word]
    assert sum("right" in text for text in texts) == 1, "tests run once without a fault"
    assert (copy / "src" / "part.py").read_text() == 'VALUE = "right"\n'
    assert plant_faults.plant(copy, fault("absent"), before) == "STALE"


def test_tests_that_hang_leave_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant_faults, "SECONDS", 3)
    command = ["bash", "-c", "sleep 60 & echo $! > child; echo said; wait"]
    with (tmp_path / "output").open("w+") as output:
        code = plant_faults.exit_code(command, tmp_path, dict(os.environ), output)
        output.seek(0)
        assert (code, output.read()) == (plant_faults.TIMEOUT, "said\n")
    child = int((tmp_path / "child").read_text())
    for _ in range(400):
        if not lives(child):
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("a process of the tests is left")


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # an ended process whose new parent has not asked for its exit code

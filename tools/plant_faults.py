"""Plant faults in copies of the source, one at a time, and see that the tests named beside each turn red.

A table of faults is a TOML file in tools/faults, one for each area of the tests:

    [[fault]]
    what = "a block is freed twice"         # the wrong behaviour, in words
    file = "src/quire/kv/pool.py"
    old = "text that stands once in it"
    new = "the text that makes the fault"
    tests = ["tests/unit/kv/test_pool.py"]  # pytest's arguments; at least one test must fail

    python tools/plant_faults.py [--tests FOLDER] [AREA ...]     AREA: name of a table; default: all of them

Each row is printed with a word. The exit code is 0 when every row is `seen`.

    seen         a test failed with the fault in place
    MISSED       no test failed
    TIMEOUT      the tests did not end in time
    RED BEFORE   the tests fail without the fault, so that they say nothing about it
    STALE        `old` does not stand once in the file
    EXIT N       pytest ended with another exit code

Each fault runs in a copy of the tree, so the working tree is never changed. Tests run once without a fault before their
first fault. `--tests FOLDER` takes the tests of another checkout, such as an older one's.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tools" / "faults"
SECONDS = 900  # of the tests of a row
TIMEOUT = 124  # exit code of tests that did not end in time


def main() -> int:
    """Plant the faults of the areas that were asked for; return 1 if one is not seen."""
    parser = argparse.ArgumentParser(description="Plant faults and see that tests turn red.")
    parser.add_argument("areas", nargs="*", help="names of tables in tools/faults (default: all)")
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout whose tests run (default: this one)")
    asked = parser.parse_args()
    paths = [TABLES / f"{area}.toml" for area in asked.areas] or sorted(TABLES.glob("*.toml"))
    missed = 0
    before: dict[tuple[str, ...], int] = {}  # exit codes without a fault, by tests
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as folder:
        copy = Path(folder) / "quire"
        copy_tree(ROOT, asked.tests.resolve(), copy)
        for path in paths:
            for fault in tomllib.loads(path.read_text())["fault"]:
                started = time.monotonic()
                word = plant(copy, fault, before)
                missed += word != "seen"
                print(f"{word:7} {path.stem}: {fault['what']} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{missed} not seen" if missed else "every fault was seen")
    return 1 if missed else 0


def copy_tree(source: Path, tests: Path, copy: Path) -> None:
    """Make a tree with the package of one checkout and the tests of another."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tools", "examples", "scripts", "docs"):
        shutil.copytree(source / name, copy / name, ignore=ignored)
    shutil.copytree(tests / "tests", copy / "tests", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(source / name, copy / name)


def plant(copy: Path, fault: dict[str, Any], before: dict[tuple[str, ...], int]) -> str:
    """Run the tests of one fault with the fault in place; return the word for it. The file is put back after it.

    before: exit codes of tests without a fault; the tests are run and added if they are not there
    """
    path = copy / fault["file"]
    text = path.read_text() if path.exists() else ""
    if text.count(fault["old"]) != 1:
        return "STALE"
    tests = tuple(fault["tests"])
    if tests not in before:
        before[tests] = run(copy, tests, red=(1,))
    if before[tests]:
        return "RED BEFORE"
    seen = path.stat().st_mtime_ns
    _write(path, text.replace(fault["old"], fault["new"]), seen + 10**10)
    try:
        code = run(copy, tests)
    finally:
        _write(path, text, seen)
    return {0: "MISSED", 1: "seen", TIMEOUT: "TIMEOUT"}.get(code, f"EXIT {code}")


def _write(path: Path, text: str, changed: int) -> None:
    """Write a file with a time of its own: Python keeps compiled code of the same size and second."""
    path.write_text(text)
    os.utime(path, ns=(changed, changed))


def run(copy: Path, tests: Sequence[str], red: Sequence[int] = ()) -> int:
    """Return pytest's exit code for these tests of the copy, or TIMEOUT.

    The end of the output is printed for every exit code but 0 and 1, and for those of `red`.
    """
    shared = os.environ.get("QUIRE_TEST_SHARED") or str(ROOT.parent / "shared")
    interpret = {} if any("e2e" in test or "dist" in test for test in tests) else {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "QUIRE_TEST_SHARED": shared, **interpret}
    quick = [] if "faults" not in (copy / "tests/conftest.py").read_text() else ["--hypothesis-profile", "faults"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *quick, *tests]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = exit_code(command, copy, environment, output)
        if code > 1 or code < 0 or code in red:
            output.seek(0)
            print(output.read()[-4000:])
    return code


def exit_code(command: Sequence[str], folder: Path, environment: dict[str, str], output: IO[str]) -> int:
    """Run a command in a process group of its own; return its exit code, or TIMEOUT. No process of the group is left.

    The output goes to a file: a pipe would stay open as long as any process that the command has left behind.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return TIMEOUT
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())

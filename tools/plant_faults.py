"""Plant faults in copies of the source, one at a time, and see that the tests named beside each turn red.

A table of faults is a TOML file in tools/faults, one for each area of the tests:

    [[fault]]
    what = "a block is freed twice"         # the wrong behaviour, in words
    file = "src/quire/kv/pool.py"
    old = "text that stands once in it"
    new = "the text that makes the fault"
    tests = ["tests/unit/kv/test_pool.py"]  # pytest's arguments; at least one test must fail

    python tools/plant_faults.py [--tests FOLDER] [AREA ...]     AREA: name of a table; default: all of them

A fault that no test sees is printed as MISSED, and the exit code is 1. Each fault runs in a copy of the tree, so the
working tree is never changed. `--tests FOLDER` takes the tests of another checkout, such as an older one's.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tools" / "faults"
SECONDS = 900  # a fault that hangs a test is seen, too


def main() -> int:
    """Plant the faults of the areas that were asked for; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description="Plant faults and see that tests turn red.")
    parser.add_argument("areas", nargs="*", help="names of tables in tools/faults (default: all)")
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout whose tests run (default: this one)")
    asked = parser.parse_args()
    paths = [TABLES / f"{area}.toml" for area in asked.areas] or sorted(TABLES.glob("*.toml"))
    missed = []
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as folder:
        copy = Path(folder) / "quire"
        copy_tree(ROOT, asked.tests.resolve(), copy)
        for path in paths:
            for fault in tomllib.loads(path.read_text())["fault"]:
                seen = plant(copy, fault, path.stem)
                if not seen:
                    missed.append(fault["what"])
    print(f"{len(missed)} missed" if missed else "every fault was seen")
    return 1 if missed else 0


def copy_tree(source: Path, tests: Path, copy: Path) -> None:
    """Make a tree with the package of one checkout and the tests of another."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tools", "examples", "scripts", "docs"):
        shutil.copytree(source / name, copy / name, ignore=ignored)
    shutil.copytree(tests / "tests", copy / "tests", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(source / name, copy / name)


def plant(copy: Path, fault: dict[str, Any], area: str) -> bool:
    """Run the tests of one fault with the fault in place; return True if one failed. The file is put back after it."""
    path = copy / fault["file"]
    before = path.read_text()
    if before.count(fault["old"]) != 1:
        print(f"STALE   {area}: {fault['what']}: `old` stands {before.count(fault['old'])} times in {fault['file']}")
        return False
    path.write_text(before.replace(fault["old"], fault["new"]))
    started = time.monotonic()
    try:
        code = run(copy, fault["tests"])
    finally:
        path.write_text(before)
    word = {1: "seen", 0: "MISSED"}.get(code, f"EXIT {code}")
    print(f"{word:7} {area}: {fault['what']} ({time.monotonic() - started:.0f} s)", flush=True)
    return code == 1


def run(copy: Path, tests: list[str]) -> int:
    """Return pytest's exit code for these tests of the copy; 1 also when they did not end in time."""
    shared = os.environ.get("QUIRE_TEST_SHARED") or str(ROOT.parent / "shared")
    interpret = {} if any("e2e" in test or "dist" in test for test in tests) else {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "QUIRE_TEST_SHARED": shared, **interpret}
    quick = [] if "faults" not in (copy / "tests/conftest.py").read_text() else ["--hypothesis-profile", "faults"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *quick, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1
    if done.returncode > 1:
        print(done.stdout[-2000:] + done.stderr[-2000:])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

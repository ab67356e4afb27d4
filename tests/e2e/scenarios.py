"""A client's scenarios: a program beside this file, run with a version of the client's package, wherever that lies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .serving import PATIENCE

OPENAI = {"openai 2.": Path(sys.prefix, "openai2"), "openai 3.": None}  # None: beside the other packages
ANTHROPIC = Path(sys.prefix, "anthropic")
SCENARIO = re.compile(r"^def (\w+)\(facts: Facts\) -> None:$", re.MULTILINE)


def run_scenarios(program: str, facts: Path, version: str, folder: Path | None) -> None:
    """Run a program, which prints the version of its client (it begins with `version`) and every scenario that went
    right, and must print them all. `folder`: where the package lies; the test is skipped if that is not there."""
    if folder is not None and not folder.is_dir():
        pytest.skip(f"{folder} is not there; scripts/test makes it")
    path = Path(__file__).with_name(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    run = subprocess.run(
        [sys.executable, str(path), str(facts)],
        env=environment | {"PYTHONPATH": str(folder or "")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    printed, *done = run.stdout.splitlines() or ["nothing"]
    assert run.returncode == 0, f"{printed}, after {done}:\n{run.stderr}"
    assert printed.startswith(version) and done == SCENARIO.findall(path.read_text())

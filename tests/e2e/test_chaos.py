"""The chaos run of tools/chaos for 20 seconds: it finds no fault. Full run only."""

import subprocess
import sys
from pathlib import Path

from ..support.full import only_full

TOOL = Path(__file__).parents[2] / "tools" / "chaos"


@only_full
def test_nothing_is_lost_or_left_when_every_part_is_killed() -> None:
    flags = ("--minutes", "0.34", "--streams", "30", "--step-ms", "50", "--every", "3")
    run = subprocess.run([sys.executable, str(TOOL), *flags], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.rstrip().endswith("no fault"), run.stdout + run.stderr

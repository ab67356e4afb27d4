"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_deepseek_on_a_cpu() -> None:
    run = subprocess.run([sys.executable, ROOT / "examples" / "deepseek_cpu.py"], capture_output=True, text=True,
                         timeout=300, env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "logits: [2, 128, 102400]"
    apart = float(lines[1].split("differ by ")[1].split()[0])
    assert 0 < apart < 1e-4
    assert any("into routed experts" in line and line.endswith("[256, 256]") for line in lines)
    assert "weights sum to 2.500" in run.stdout

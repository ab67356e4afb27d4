"""The script that runs both engines in turn finds the package of its own checkout."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_it_runs_from_a_checkout_without_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && shift; echo "${1##*/} $PYTHONPATH"\n')
    python.chmod(0o755)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    script = ROOT / "tools" / "peer" / "alternate.sh"
    done = subprocess.run(["bash", script, python, python], cwd=tmp_path, capture_output=True, text=True, check=True)
    path = f"{ROOT}/src:{before}" if before else f"{ROOT}/src"
    ran = [line for line in done.stdout.splitlines() if not line.startswith("round")]
    assert ran == [f"quire {path}", f"run_vllm.py {path}"] * 6

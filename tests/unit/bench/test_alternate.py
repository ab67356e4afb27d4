"""The script that runs both engines in turn finds the package of its own checkout."""

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_it_runs_from_a_checkout_without_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$2 $PYTHONPATH"\n')
    python.chmod(0o755)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    script = SOURCE / "quire" / "bench" / "peer" / "alternate.sh"
    done = subprocess.run(["bash", script, python, python], cwd=tmp_path, capture_output=True, text=True, check=True)
    path = f"{SOURCE}:{before}" if before else str(SOURCE)
    ran = [line for line in done.stdout.splitlines() if not line.startswith("round")]
    assert ran == [f"quire {path}", f"quire.bench.peer.run_vllm {path}"] * 6


def test_an_installed_copy_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages that were installed beside it are one engine's, and would disturb the other."""
    python, peer = tmp_path / "python", tmp_path / "lib" / "site-packages" / "quire" / "bench" / "peer"
    python.write_text('#!/bin/sh\necho "with $PYTHONPATH."\n')
    python.chmod(0o755)
    peer.mkdir(parents=True)
    script = peer / "alternate.sh"
    script.write_text((SOURCE / "quire" / "bench" / "peer" / "alternate.sh").read_text())
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = subprocess.run(["bash", script, python, python], capture_output=True, text=True, check=True)
    assert done.stdout.count("with .") == 12

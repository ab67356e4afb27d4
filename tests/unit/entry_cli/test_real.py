"""The commands with the bundled model: what the fakes of the other tests stand for."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.entry.cli.main import main

SOURCE = Path(__file__).resolve().parents[3] / "src"

FLAGS = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--max-model-len", "128", "--num-threads", "1"]


def test_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-p", "import json\n", *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "answer 4 tokens" in err


def test_chat_keeps_its_history_in_the_prefix_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the json module for?\nAnd the os module?\n"))
    assert main(["chat", "--block-size", "8", *FLAGS]) == 0
    out, err = capsys.readouterr()
    stats = [line for line in err.splitlines() if "answer 4 tokens" in line]
    assert len(stats) == 2 and "cached" not in stats[0] and "cached" in stats[1]
    assert out.count("\n") >= 2


def in_a_process(code: str, args: list[str]) -> "subprocess.CompletedProcess[str]":
    """The command line in a process of its own, after `code`: pytest's own handlers hide what Python logs."""
    code = f"import sys; {code}; from quire.entry.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )


LATENCY = ["bench", "latency", "quire-tiny", "--max-len", "4", "--repeat", "1"]


@pytest.mark.parametrize(
    "args",
    [
        ["complete", "-p", "a", "--max-tokens", "1"],
        ["chat", "-q", "a", "--max-tokens", "1"],
        ["trace", "-p", "a"],
        LATENCY,
    ],
)
def test_a_note_is_printed_once(args: list[str]) -> None:
    told = in_a_process("pass", [*args, "--device", "cpu", "--gpu-memory-utilization", "0.5"])
    assert told.returncode == 0, told.stderr
    lines = [line for line in told.stderr.splitlines() if "changes nothing" in line]
    assert lines == ["quire: note: gpu_memory_utilization changes nothing on a CPU."]


@pytest.mark.parametrize(
    "args",
    [
        ["complete", "-p", "a"],
        ["chat", "-q", "a"],
        ["serve", "--port", "0"],
        ["trace"],
        ["verify"],
        ["bench", "startup"],
        LATENCY,
        ["bench", "kernels"],
        ["run-batch"],
    ],
)
def test_without_torch_there_is_one_line(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    )
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    args = [*args, *(files if args[0] == "run-batch" else [])]
    told = in_a_process("sys.modules['torch'] = None", [*args, "--device", "cpu"])
    assert told.returncode == 3 and "Traceback" not in told.stderr
    (line,) = [line for line in told.stderr.splitlines() if "error" in line]
    assert line == (
        "quire: error: torch is not installed, and this needs it: run `pip install .` in Quire's folder, "
        "where its README.md is."
    )


def test_a_missing_module_of_ours_is_a_bug() -> None:
    told = in_a_process("sys.modules['quire.entry.llm'] = None", ["complete", "-p", "a"])
    assert told.returncode == 1 and "Traceback" in told.stderr


class Terminal(io.StringIO):
    """A terminal that keeps what is drawn."""

    def isatty(self) -> bool:
        return True


def test_a_measurement_shows_its_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    assert main([*LATENCY, "--device", "cpu"]) == 0
    assert "Loading the model" in screen.getvalue() and "Measuring" in screen.getvalue()
    assert "4/4" in screen.getvalue()

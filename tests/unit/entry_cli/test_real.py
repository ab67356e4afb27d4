"""The commands with the bundled model: what the fakes of the other tests stand for."""

import io
import json
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


END = "exit code of the command:"


def in_a_process(code: str, *lines: list[str]) -> tuple[int, list[tuple[int, list[str]]]]:
    """Run command lines in turn in a process of their own, after `code`: pytest's own handlers hide what Python logs.

    Returns the exit code of the process, which is that of the last command, and (exit code, lines of stderr) of each.
    """
    program = f"""
import json, sys
{code}
from quire.entry.cli.main import main
for args in json.loads(sys.argv[1]):
    code = main(args)
    print("{END}", code, file=sys.stderr, flush=True)
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    told: list[tuple[int, list[str]]] = []
    own: list[str] = []
    for line in done.stderr.splitlines():
        if line.startswith(END):
            told.append((int(line.removeprefix(END)), own))
            own = []
        else:
            own.append(line)
    if len(told) < len(lines):  # the last one ended with an exception
        told.append((done.returncode, own))
    return done.returncode, told


LATENCY = ["bench", "latency", "quire-tiny", "--max-len", "4", "--repeat", "1"]


def test_a_note_is_printed_once() -> None:
    """Also by a later command of a process: a handler is not added to those of an earlier command."""
    commands = [
        ["complete", "-p", "a", "--max-tokens", "1"],
        ["chat", "-q", "a", "--max-tokens", "1"],
        ["trace", "-p", "a"],
        LATENCY,
    ]
    flags = ["--device", "cpu", "--gpu-memory-utilization", "0.5"]
    code, told = in_a_process("pass", *([*args, *flags] for args in commands))
    assert code == 0, told
    for args, (ended, lines) in zip(commands, told, strict=True):
        notes = [line for line in lines if "changes nothing" in line]
        assert (ended, notes) == (0, ["quire: note: gpu_memory_utilization changes nothing on a CPU."]), args


def test_without_torch_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    )
    commands = [
        ["complete", "-p", "a"],
        ["chat", "-q", "a"],
        ["serve", "--port", "0"],
        ["trace"],
        ["verify"],
        ["bench", "startup"],
        LATENCY,
        ["bench", "kernels"],
        ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")],
    ]
    code, told = in_a_process("sys.modules['torch'] = None", *([*args, "--device", "cpu"] for args in commands))
    assert code == 3
    for args, (ended, lines) in zip(commands, told, strict=True):
        assert ended == 3 and not any("Traceback" in line for line in lines), (args, lines)
        (line,) = [line for line in lines if "error" in line]
        assert line == (
            "quire: error: torch is not installed, and this needs it: run `pip install .` in Quire's folder, "
            "where its README.md is."
        )


def test_a_missing_module_of_ours_is_a_bug() -> None:
    code, told = in_a_process("sys.modules['quire.entry.llm'] = None", ["complete", "-p", "a"])
    assert code == 1 and any("Traceback" in line for _, lines in told for line in lines)


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

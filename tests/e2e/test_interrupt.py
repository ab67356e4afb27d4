"""Ctrl-C at any moment of a command's start: exit code 130 and not a word. Real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..support.full import full_rows

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMPLETE = ("complete", "-p", "x", "--max-tokens", "4000", "--ignore-eos", "--num-threads", "1")
# Presses Ctrl-C when a module is first looked for; what the import makes of it is the test.
START = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
at = sys.argv[1]
class Finder:
    ready = os.environ.get("READY")  # a file, made once the handler of the command is there
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)
        if self.ready and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            self.ready = open(self.ready, "w").close()
sys.meta_path.insert(0, Finder())
sys.argv = ["quire", *sys.argv[2:]]
runpy.run_module("quire", run_name="__main__", alter_sys=True)
"""


def started(at: str, *args: str, **more: str) -> "subprocess.Popen[str]":
    variables = os.environ | {"PYTHONPATH": str(SOURCE)} | more
    return subprocess.Popen(
        [sys.executable, "-c", START, at, *args],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("quire.entry.cli.main", ("--help",)),
        ("numpy.linalg._umath_linalg", COMPLETE),
        ("torch.autograd", COMPLETE),
        ("quire.plan.engine", ("chat", *COMPLETE[3:])),
        ("uvicorn", ("serve", "--port", "0")),
        *full_rows(
            (
                ("argparse", ("weights",)),
                ("numpy", COMPLETE),
                ("torch", COMPLETE),
                ("tokenizers", COMPLETE),
                ("zmq", ("serve", "--port", "0")),
            )
        ),
    ],
)
def test_within_an_import(module: str, args: tuple[str, ...]) -> None:
    with started(module, *args) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize("command", [COMPLETE, ("serve", "--port", "0")], ids=lambda command: command[0])
def test_after_any_delay(command: tuple[str, ...], tmp_path: Path, full: bool) -> None:
    for delay in (0.0, 0.1, 0.15, 0.2, 0.35, 0.65) if full else (0.0, 0.15, 0.65):
        ready = tmp_path / str(delay)
        with started("", *command, READY=str(ready)) as process:
            while not ready.exists():
                time.sleep(0.002)
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        if "Quire 0" not in err:  # a server that is ready stops in good order, with 0
            assert process.returncode == 130, (delay, err)
        assert "Traceback" not in err, (delay, err)


def test_an_answer_that_is_stopped_is_counted() -> None:
    """The handler of the start is gone once the model is loaded."""
    with started("", *COMPLETE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "quire: prompt 1 tokens, answer " in err and "Traceback" not in err

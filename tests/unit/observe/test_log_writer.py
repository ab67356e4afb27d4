"""A log that nobody reads stops nobody; lines keep their order, and a line says how many are lost."""

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.entry.cli.main import main
from quire.observe.log_writer import LogWriter, log_written_apart


def told(number: int) -> str:
    return f"{number} lost"


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        pass


def test_a_pipe_that_is_not_read_or_whose_reader_is_gone() -> None:
    reader, number = os.pipe()
    with open(number, "w") as stream, open(reader) as other:
        log, size = LogWriter(stream, told, most=10_000), fcntl.fcntl(number, fcntl.F_GETPIPE_SZ)
        os.write(number, b"x" * (size - 1) + b"\n")
        for i in range(2_000):  # far beyond the queue
            print(f"line {i}", file=log)
        lost = log._lost
        assert 0 < lost < 2_000 and len(other.readline()) == size
        got = [other.readline() for _ in range(2_000 - lost)]
        assert got == [f"line {i}\n" for i in range(2_000 - lost)]
        wait_for(lambda: log._done == log._put)
        print("one ", end="", file=log)
        print("more", file=log)
        assert [other.readline(), other.readline()] == [f"{lost} lost\n", "one more\n"]
        other.close()
        for _ in range(2):
            print("no reader", file=log, flush=True)
            wait_for(lambda: log._done == log._put)
        log.drain()
        assert log._lost == 2


def test_a_file_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream:
        log = LogWriter(stream, told)
        print("one", file=log)
        with monkeypatch.context() as full:
            full.setattr(LogWriter, "_written", lambda log, data: False)
            print("two", file=log)
        print("three", file=log)
        assert (tmp_path / "log").read_text() == "one\n1 lost\nthree\n"


def test_the_end_does_not_wait_for_a_reader_for_ever() -> None:
    reader, number = os.pipe()
    with open(number, "w") as stream, open(reader):
        log = LogWriter(stream, told)
        for _ in range(3):
            print("x" * 100_000, file=log)
        log.drain(0.01)
        assert log._done == 0


def test_standard_error_of_a_server_is_written_apart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = list[type]()

    def run(config: object, console: object) -> int:
        seen.append(type(sys.stderr))
        print("a line", file=sys.stderr)
        return 0

    monkeypatch.setattr("quire.entry.http.server.run", run)
    assert main(["serve", "--device", "mock"]) == 0
    assert seen == [LogWriter] and sys.stderr is not LogWriter and capfd.readouterr().err == "a line\n"
    with log_written_apart(told):
        print("another", file=sys.stderr)
    assert capfd.readouterr().err == "another\n"

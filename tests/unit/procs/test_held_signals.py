"""Signals of an operator wait from the first line of a server."""

import signal
import sys
from collections.abc import Iterator

import pytest

import quire.__main__ as program
import quire.entry.cli.main
from quire.procs.held_signals import HELD


def blocked() -> bool:
    """Return True if this thread keeps all of these signals."""
    return {*HELD} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    interrupt = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(("words", "held"), [("--debug serve", True), ("route", True), ("chat serve", False)])
def test_a_server_keeps_signals_before_its_imports(words: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", *words.split()])
    monkeypatch.setattr(quire.entry.cli.main, "main", lambda: int(blocked()))
    assert program.main() == int(held)

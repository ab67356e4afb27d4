"""A progress bar on a terminal, where the total is known, comes late or never comes."""

import io
import sys

import pytest

from quire.observe.progress import Progress


class Terminal(io.StringIO):
    """A terminal that keeps what is drawn."""

    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, total: int, unit: str, *updates: tuple[int, int]) -> str:
    """Return the text that a bar has drawn on standard error after these updates."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen := Terminal())
        with Progress("Loading", total, enabled=True, unit=unit) as progress:
            for update in updates:
                progress.update(*update)
    return screen.getvalue()


@pytest.mark.parametrize(("unit", "share"), [("B", "1.0/2.0 MiB"), ("prompt", "1048576/2097152")])
@pytest.mark.parametrize("known", [True, False])
def test_what_is_shown(monkeypatch: pytest.MonkeyPatch, unit: str, share: str, known: bool) -> None:
    shown = drawn(monkeypatch, 2 << 20 if known else 0, unit, (1 << 20, 2 << 20))
    assert share in shown and "0/0" not in shown


@pytest.mark.parametrize("unit", ["B", "steps"])
def test_without_a_total_the_time_is_shown(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    shown = drawn(monkeypatch, 0, unit, (0, 0))
    assert "Loading" in shown and "0:00:00" in shown and "0/" not in shown and "0 bytes" not in shown


def test_nothing_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with Progress("starting", 3, enabled=True, unit="B") as progress:
        progress.advance(1)
    assert out.getvalue() == ""

"""Tests of forks: the order in which streams wait for each other."""

from typing import Any

import pytest

from quire.kernels.streams import Fork

from ...support.fake_streams import fake_streams

BESIDE = ["side waits for main", "in side", "work", "out of side"]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake side stream, and a log of the calls to it and to the current stream."""
    return fake_streams(monkeypatch)


@pytest.mark.parametrize("early", [True, False])
def test_a_fork_is_joined_once(streams: Any, early: bool) -> None:
    side, log = streams
    with Fork(side) as fork:
        with fork.beside:
            log.append("work")
        if early:
            assert fork.join() and not fork.join()
            log.append("last")
    assert log == [*BESIDE, "main waits for side", *(["last"] if early else [])]
    assert not fork.join()


@pytest.mark.parametrize("where", ["first", "beside", "last"])
def test_a_fork_is_joined_whatever_is_raised(streams: Any, where: str) -> None:
    side, log = streams
    with pytest.raises(ZeroDivisionError), Fork(side) as fork:
        if where == "first":
            raise ZeroDivisionError
        with fork.beside:
            log.append("work")
            if where == "beside":
                raise ZeroDivisionError
        raise ZeroDivisionError
    assert log == [*(BESIDE[:1] if where == "first" else BESIDE), "main waits for side"]


def test_without_a_side_there_is_one_stream(streams: Any) -> None:
    _, log = streams
    with Fork(None) as fork:
        with fork.beside:
            log.append("work")
        assert not fork.join()
    assert log == ["work"]

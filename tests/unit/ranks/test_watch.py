"""The watch over ranks, with ends of sockets instead of processes: it names the rank that is the cause of a fault."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.contracts.errors import ConfigError, EngineDead
from quire.procs.frames import Frames
from quire.procs.messages import Failed
from quire.procs.wire import encode
from quire.ranks.messages import RankBeat, RankFailed, RankReceived
from quire.ranks.watch import RankTimes, RankWatch, WatchedRank

from ...support.started_ranks import nothing_left


class StandIn:
    """A process that ends when it is killed, or has `how` ended, or is stopped."""

    def __init__(self, pid: int) -> None:
        self.pid, self.how, self.is_stopped = pid, None, False

    def ended(self) -> str | None:
        return self.how

    def stopped(self) -> bool:
        return self.is_stopped

    def kill(self) -> None:
        self.how = self.how or "was killed by the watch"

    def release(self, seconds: float = 0.0) -> None:
        assert self.how is not None


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


@contextmanager
def watched(count: int) -> Iterator[tuple[list[WatchedRank], list[Frames]]]:
    pairs = [socket.socketpair() for _ in range(count)]
    ends = [Frames(theirs) for _, theirs in pairs]
    try:
        yield [WatchedRank(f"rank {i}", StandIn(i), Frames(ours)) for i, (ours, _) in enumerate(pairs)], ends
    finally:
        for end in ends:
            end.close()


def failure(kind: str, message: str, at: float) -> bytes:
    return encode(RankFailed(Failed(kind, message, "Traceback"), at))


def test_the_earliest_of_several_failures_is_the_cause() -> None:
    with watched(3) as (ranks, ends):
        ends[0].send(failure("EngineDead", "a peer is gone", 12.5))
        ends[2].send(failure("EngineDead", "out of memory", 12.25))
        watch = RankWatch(ranks, RankTimes())
        assert str(watch.wait()) == "rank 2 (pid 2) failed: out of memory"
        watch.close()


def test_the_end_of_a_rank_explains_the_failure_of_another_one() -> None:
    with watched(3) as (ranks, ends):
        ends[0].send(failure("EngineDead", "a peer is gone", 12.5))
        ends[1].close()
        ranks[1].child.how = "was killed by SIGKILL"
        watch = RankWatch(ranks, RankTimes())
        assert str(watch.wait()) == "rank 1 (pid 1) was killed by SIGKILL."
        watch.close()


def test_an_error_that_the_user_can_fix_explains_all_else() -> None:
    with watched(3) as (ranks, ends):
        ends[0].send(failure("EngineDead", "a peer is gone", 12.0))
        ends[1].close()
        ends[2].send(failure("ConfigError", "lower max_model_len", 12.5))
        watch = RankWatch(ranks, RankTimes())
        error = watch.wait()
        assert type(error) is ConfigError and str(error) == "lower max_model_len"
        watch.close()


def test_a_message_before_the_end_is_taken() -> None:
    with watched(2) as (ranks, ends):
        for step in range(100):
            ends[1].send(encode(RankReceived(step)))
        ends[1].send(failure("EngineDead", "last words", 1.0))
        ends[1].close()
        ranks[1].child.how = "exited with code 1"
        watch = RankWatch(ranks, RankTimes())
        error = watch.wait()
        assert str(error) == "rank 1 (pid 1) failed: last words" and ranks[1].received == 99
        watch.close()


def test_an_end_that_only_the_process_shows_is_seen() -> None:
    """Its connection lives on in a process that was forked from the rank."""
    with watched(2) as (ranks, _):
        ranks[1].child.how = "was killed by SIGSEGV"
        watch = RankWatch(ranks, RankTimes())
        ranks[1].sent = 4
        assert str(watch.wait()) == "rank 1 (pid 1) was killed by SIGSEGV (step 4 not acknowledged)."
        watch.close()


def test_half_a_message_keeps_nobody_waiting() -> None:
    with watched(2) as (ranks, ends):
        ends[0]._end.sendall(b"\xff\xff\x00\x00half")
        watch = RankWatch(ranks, RankTimes())
        ends[1].send(failure("EngineDead", "last words", 1.0))
        assert "last words" in str(watch.wait())
        watch.close()


def test_bytes_that_are_no_message_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with watched(2) as (ranks, ends):
        watch = RankWatch(ranks, RankTimes())
        ends[1].send(b"junk")
        error = watch.wait()
        assert type(error) is EngineDead and "ValidationError" in str(error) and "Traceback" in caplog.text
        watch.close()


def test_silence_is_told_with_the_step_that_is_not_acknowledged() -> None:
    with watched(2) as (ranks, ends):
        watch = RankWatch(ranks, RankTimes(silent=0.6))
        ranks[0].sent = ranks[1].sent = 12
        ends[1].send(encode(RankReceived(11)))
        ends[0].send(encode(RankReceived(12)))
        while watch._over is None:
            ends[0].send(encode(RankBeat()))
            if watch._told.wait(0.05):
                break
        told = r"rank 1 \(pid 1\) runs, but has sent nothing for \d+ s \(step 12 not acknowledged\)\."
        assert re.match(told, str(watch.wait()))
        watch.close()


def test_a_rank_has_longer_to_begin() -> None:
    with watched(1) as (ranks, _):
        watch = RankWatch(ranks, RankTimes(silent=0.1, start=1.0))
        time.sleep(0.5)
        watch.check()
        assert "has sent nothing" in str(watch.wait())
        watch.close()


def test_a_stopped_rank_is_told_sooner_than_a_silent_one() -> None:
    with watched(2) as (ranks, ends):
        ranks[1].child.is_stopped = True
        watch = RankWatch(ranks, RankTimes(stopped=0.5))
        ends[0].send(encode(RankBeat()))
        ranks[0].child.is_stopped = False
        assert str(watch.wait()).startswith("rank 1 (pid 1) is stopped (SIGSTOP, or a debugger) and has sent nothing")
        watch.close()

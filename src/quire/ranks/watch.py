"""The watch over an engine's ranks: a thread that reads their messages and notices a dead, stopped or silent rank.

A fault of one rank ends all: the others may wait for it inside a collective operation for ever. The thread kills and
reaps them, and every caller that waits gets the error. Knows processes, sockets and messages; decides nothing about
requests.
"""

import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from quire.contracts.errors import EngineClosed, EngineDead, QuireError, UserError
from quire.contracts.step import StepResult
from quire.procs.child_process import REAP_SECONDS
from quire.procs.failures import KINDS, rebuilt
from quire.procs.frames import Frames
from quire.procs.messages import Failed, Loading, Stop
from quire.procs.wire import encode
from quire.ranks.launchers import RankProcess
from quire.ranks.messages import (
    FROM_RANK,
    FromRank,
    RankBeat,
    RankBuilt,
    RankCopied,
    RankFailed,
    RankReady,
    RankReceived,
    RankReply,
    RankResult,
)

LOG = logging.getLogger("quire")
TICK_SECONDS = 0.1  # between two looks at the processes; messages and ends of connections are seen at once
MOMENT_SECONDS = 0.05  # after the first sign of a fault, for the signs of other ranks: the cause may be among them
EXIT_SECONDS = 0.2  # between the end of a rank's connection and the end of its process
HOST_EXIT_SECONDS = 1.0  # the same for a rank of another host, whose agent reports the end

Answer = Loading | RankBuilt | RankReady | RankReply
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Time limits for the processes of ranks, in seconds. A rank that is silent for too long ends the engine.

    beat      time between two heartbeats of a rank
    start     longest silence while a rank starts Python and imports modules, perhaps from a slow disk
    stopped   longest silence of a rank that a signal (SIGSTOP) or a debugger has stopped
    silent    longest silence of a running rank; it is long because a library may hold the GIL while it compiles
    hang      time after which a rank logs where a step hangs
    stop      time to exit after a `Stop` message; then the rank is killed
    """

    beat: float = 1.0
    start: float = 300.0
    stopped: float = 5.0
    silent: float = 60.0
    hang: float = 60.0
    stop: float = 2.0


class WatchedRank:
    """A rank's process and connection, with their state as `RankWatch` sees it.

    host       name of the rank's host; "" for this host
    heard      time of the last message (`time.monotonic`)
    begun      True after the first message other than a heartbeat
    sent       number of the step that was sent last, or is being sent; -1: none
    received   last step that the rank has acknowledged; -1: none
    results    step results of the rank that nobody has taken yet; None among them: the ranks have ended
    copied     reports of copies and loads of a rank that sends no results, which nobody has taken yet
    failed     the message by which the rank reported its failure, or None
    failed_at  time of its failure. The clock of another host differs: then it is the time of the message's arrival
    cut        True after the connection has ended
    """

    def __init__(self, name: str, child: RankProcess, frames: Frames, host: str = "") -> None:
        self.name, self.child, self.frames, self.host = name, child, frames, host
        self.heard = time.monotonic()
        self.begun = False
        self.sent = self.received = -1
        self.results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self.copied: queue.SimpleQueue[RankCopied] = queue.SimpleQueue()
        self.failed: RankFailed | None = None
        self.failed_at = 0.0
        self.cut = False

    def __str__(self) -> str:
        begin = f"{self.name[:-1]}, " if self.name.endswith(")") else f"{self.name} ("
        return f"{begin}pid {self.child.pid}{f' on {self.host}' if self.host else ''})"

    @property
    def gone(self) -> bool:
        """True when the process or its connection has ended."""
        return self.cut or self.child.ended() is not None

    def read(self) -> list[FromRank]:
        """Return the messages that have arrived, without waiting. Sets `cut` at the end of the connection."""
        messages: list[FromRank] = []
        try:
            while found := self.frames.receive():
                messages += map(FROM_RANK.decode, found)
        except EOFError:
            self.cut = True
        return messages


class RankWatch:
    """A thread that reads the ranks' messages and kills all ranks when one fails. Runs until all ranks have ended.

    After that `result`, `answer` and `check` raise the reason: the failure of a rank, or `EngineClosed`.
    ready     True when all ranks can run steps
    arrived   set when a step result arrives, and when the ranks have ended
    """

    def __init__(self, ranks: Sequence[WatchedRank], times: RankTimes, arrived: threading.Event | None = None) -> None:
        self.ranks = tuple(ranks)
        self.ready = False
        self._arrived = arrived or threading.Event()
        self._times = times
        self._process = os.getpid()
        self._answers: queue.SimpleQueue[tuple[int, Answer] | None] = queue.SimpleQueue()
        self._over: Failed | None = None  # the reason of the ranks' end
        self._told = threading.Event()  # set after `_over`
        self._abandoned: Failed | None = None
        self._kill_at: float | None = None  # set by `close`
        self._wakes, self._woken = socket.socketpair()  # wakes the thread: a rank has no room for a message
        for end in (self._wakes, self._woken):
            end.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._woken.fileno(), select.POLLIN)
        self._by_descriptor = {rank.frames.fileno(): index for index, rank in enumerate(self.ranks)}
        for descriptor in self._by_descriptor:
            self._poller.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()

    def post(self, index: int, message: bytes) -> None:
        """Send a message to a rank. The thread sends what finds no room. Raises `OSError` when the rank is gone."""
        frames = self.ranks[index].frames
        frames.post(message)
        if frames.full:
            with suppress(BlockingIOError):  # the thread is about to wake
                self._wakes.send(b"\0")

    def result(self, index: int) -> StepResult:
        """Wait for the next step result of a rank, and return it. Raises the error when the ranks have ended."""
        self.check()
        return self._next(self.ranks[index].results)

    def answer(self, seconds: float | None = None) -> tuple[int, Answer]:
        """Wait for the next other answer, such as `RankReady`. Return the index of its rank, and the answer.

        Raises `queue.Empty` when none has come in so many seconds.
        """
        self.check()
        return self._next(self._answers, seconds)

    def check(self) -> None:
        """Raise the error if the ranks have ended."""
        if self._over is not None:
            raise self._error()

    def wait(self) -> QuireError:
        """Wait until the ranks have ended, after a message could not be sent. Return the error."""
        self._told.wait()
        return self._error()

    def abandon(self, message: str) -> None:
        """Kill all ranks because of a fault in this process, and wait. `message` is the text of the error."""
        self._abandoned = Failed(EngineDead.__name__, message)
        self._told.wait()

    def close(self, *, wait: bool = True) -> None:
        """End all ranks. Ready ranks have `RankTimes.stop` seconds to exit, then are killed.

        wait   True: wait for their end
        Idempotent. Has no effect in a process that was forked from the one that made the ranks.
        """
        if os.getpid() != self._process:
            return
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (self._times.stop if self.ready else 0.0)
            stop = encode(Stop())
            for index in range(len(self.ranks)):
                with suppress(OSError):  # a rank that cannot take it is killed
                    self.post(index, stop)
        if wait and self._thread.ident != threading.get_ident():  # the garbage collector may run there
            self._thread.join()

    def _next(self, waiting: "queue.SimpleQueue[M | None]", seconds: float | None = None) -> M:
        message = waiting.get(timeout=seconds)
        if message is None:
            raise self._error()
        return message

    def _error(self) -> QuireError:
        assert self._over is not None
        return rebuilt(self._over.kind, self._over.message)

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            over = self._watch()
        except Exception as fault:  # a fault of ours: no caller may wait for ever
            LOG.exception("the watch over the ranks failed")
            over = Failed(EngineDead.__name__, f"the watch over the ranks failed: {type(fault).__name__}: {fault}")
        for rank in self.ranks:
            rank.child.kill()
        self._over = over
        self._told.set()
        self._answers.put(None)
        for rank in self.ranks:
            rank.results.put(None)
            rank.frames.close()
        for end in (self._wakes, self._woken):
            end.close()
        self._arrived.set()
        until = time.monotonic() + REAP_SECONDS
        for rank in self.ranks:
            rank.child.release(max(0.0, until - time.monotonic()))

    def _watch(self) -> Failed:
        """Watch the ranks to their end; return its reason."""
        looked = time.monotonic()
        while True:
            for descriptor, events in self._poller.poll(1000 * TICK_SECONDS):
                self._serve(descriptor, events)
            now = time.monotonic()
            if self._kill_at is not None:
                if now >= self._kill_at or all(rank.gone for rank in self.ranks):
                    return Failed(EngineClosed.__name__, "the engine was closed.")
            elif self._abandoned is not None:
                return self._abandoned
            elif any(rank.cut or rank.failed is not None for rank in self.ranks):
                return self._cause()
            elif now - looked >= TICK_SECONDS:
                if any(rank.gone for rank in self.ranks):
                    return self._cause()
                if now - looked > self._times.stopped / 2:  # this process was stopped, or got no processor
                    for rank in self.ranks:
                        rank.heard = now
                looked = now
                if (silence := self._silence(now)) is not None:
                    return silence

    def _serve(self, descriptor: int, events: int) -> None:
        """Take the messages of a rank that have arrived, and send those that have found room."""
        if descriptor == self._woken.fileno():
            self._woken.recv(1 << 16)
        else:
            rank = self.ranks[self._by_descriptor[descriptor]]
            if events & select.POLLOUT:
                with suppress(OSError):  # it is gone: `read` says so
                    rank.frames.flush()
            if events & ~select.POLLOUT and not rank.cut:
                self._read(self._by_descriptor[descriptor])
            if not events & select.POLLOUT:
                return
        for each, index in self._by_descriptor.items():
            if not self.ranks[index].cut:
                room = select.POLLOUT if self.ranks[index].frames.full else 0
                self._poller.modify(each, select.POLLIN | room)

    def _read(self, index: int) -> None:
        rank = self.ranks[index]
        for message in rank.read():
            rank.heard, rank.begun = time.monotonic(), rank.begun or not isinstance(message, RankBeat)
            if isinstance(message, RankReceived):
                rank.received = message.step
            elif isinstance(message, RankResult):
                rank.results.put(message.result)
                self._arrived.set()
            elif isinstance(message, RankCopied):
                rank.copied.put(message)
            elif isinstance(message, RankFailed) and rank.failed is None:
                rank.failed, rank.failed_at = message, rank.heard if rank.host else message.at
            elif isinstance(message, Answer):
                self._answers.put((index, message))
        if rank.cut:
            self._poller.unregister(rank.frames.fileno())

    def _cause(self) -> Failed:
        """Return the cause of a fault. The failure of a rank may follow from the end of another one.

        An error that the user can fix comes first, then ranks that ended without a word, then the first failure.
        """
        time.sleep(MOMENT_SECONDS)
        for index, rank in enumerate(self.ranks):
            if not rank.cut:
                self._read(index)
        dead = [rank for rank in self.ranks if rank.failed is None and rank.gone]
        for rank in self.ranks:
            if rank not in dead:
                rank.child.kill()
        failures = sorted(
            ((rank.failed, rank) for rank in self.ranks if rank.failed is not None),
            key=lambda failure: failure[1].failed_at,
        )
        for message, _ in failures:
            if issubclass(KINDS.get(message.failed.kind, EngineDead), UserError):
                return message.failed
        if dead:
            until = time.monotonic() + (HOST_EXIT_SECONDS if any(rank.host for rank in dead) else EXIT_SECONDS)
            return Failed(EngineDead.__name__, "; ".join(f"{rank} {self._ending(rank, until)}" for rank in dead) + ".")
        message, rank = failures[0]
        if message.failed.details:
            LOG.error("%s failed:\n%s", rank, message.failed.details)
        return Failed(message.failed.kind, f"{rank} failed: {message.failed.message}")

    def _ending(self, rank: WatchedRank, until: float) -> str:
        while (how := rank.child.ended()) is None and time.monotonic() < until:
            time.sleep(0.002)
        return (how or "closed its connection") + self._unread(rank)

    def _silence(self, now: float) -> Failed | None:
        """Return the fault of a rank that has given no sign of life for too long; None when there is no such rank."""
        for rank in self.ranks:
            silent, words = now - rank.heard, ""
            if silent >= self._times.stopped and rank.child.stopped():
                words = "is stopped (SIGSTOP, or a debugger) and"
            elif silent >= (self._times.silent if rank.begun else self._times.start):
                words = "runs, but"
            if words:
                silence = f"{rank} {words} has sent nothing for {silent:.0f} s{self._unread(rank)}."
                return Failed(EngineDead.__name__, f"{silence} It was killed, with the ranks that need it.")
        return None

    def _unread(self, rank: WatchedRank) -> str:
        return f" (step {rank.sent} not acknowledged)" if rank.received < rank.sent else ""

"""The process of a rank: a receiver answers the engine core at any time, the main thread launches, a collector waits.

    receiver    reads the socket from the beginning, acknowledges steps, sends a beat, ends an orphaned process
    main        builds the rank, then runs steps, masks and controls in the order of their arrival
    collector   waits for the device, step by step; so the main thread can launch a step while another one runs

Knows the socket and the messages. Knows nothing of models, devices and groups of ranks.
"""

import importlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol

from quire.contracts.errors import UserError
from quire.procs.async_executor import Launches
from quire.procs.failures import failed
from quire.procs.frames import Frames
from quire.procs.messages import Loading, Stop
from quire.procs.step_watch import StepWatch, plan_words
from quire.procs.wire import encode
from quire.ranks.messages import (
    TO_RANK,
    FromRank,
    RankBeat,
    RankBuilt,
    RankControl,
    RankCopied,
    RankFailed,
    RankMasks,
    RankReady,
    RankReceived,
    RankReply,
    RankResult,
    RankSize,
    RankStart,
    RankStep,
    ToRank,
)

FIRST_BEAT_SECONDS = 1.0  # until `RankStart` has told the time between two beats


class RunningRank(Launches, Protocol):
    """A rank that is ready to run steps, in its own process.

    `collect` runs in a thread of its own, beside `submit`, `release` and `control`. Make a setting of a thread, such
    as the current CUDA device, in both threads.
    depth   maximum number of steps that are submitted and not collected; see `ExecutorFacts`
    """

    depth: int

    @property
    def payload(self) -> bytes:
        """Message for the engine core, in `RankReady`: `depth`, the chosen implementations, and lines for the user."""

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Run a named operation; see `Executor.control`. A `UserError` goes to the caller; others end the rank."""

    def close(self) -> None:
        """Free all resources. Called when no step is running."""


class LoadedRank(Protocol):
    """A rank that has loaded its weights. Only sizes that depend on all ranks, such as the KV cache's, are missing."""

    @property
    def payload(self) -> bytes:
        """Message for the engine core, in `RankBuilt`: the memory of this rank's device."""

    def size(self, payload: bytes) -> RunningRank:
        """Finish by the memory sizes in `payload`, such as the KV cache's. Return the rank, ready to run."""


Steps = queue.SimpleQueue[bool]  # True for each step that can be collected, then False
BuildRank = Callable[[bytes, Callable[[int, int], None]], LoadedRank]  # (start, loading(done, total) in bytes)


def run_rank() -> NoReturn:
    """Run a rank until it ends, then exit the process. This is the main function of a rank's process.

    The command line has two arguments: a module with a function `build_rank` (see `BuildRank`), and a socket's file
    descriptor. The module is imported last: its imports take long, and the rank sends heartbeats meanwhile.
    """
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        sys.exit("this module is a rank of an engine: use `quire serve` or `LLM`, which start all ranks.")

    def build(start: bytes, on_loading: Callable[[int, int], None]) -> LoadedRank:
        loaded: LoadedRank = importlib.import_module(sys.argv[1]).build_rank(start, on_loading)
        return loaded

    code = serve_rank(Frames.inherited(int(sys.argv[2])), build)
    sys.stderr.flush()
    os._exit(code)  # skips the interpreter's shutdown, which a library's thread could block


def serve_rank(frames: Frames, build: BuildRank) -> int:
    """Build a rank and run its loop until a `Stop` message (returns 0) or an error (returns 1).

    The engine core gets the error as `RankFailed`. Call this in the main thread.
    """
    # The engine core decides when a rank ends. Ctrl-C does not reach this session, but a service manager sends SIGTERM
    # to every process of a unit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    link = _Link(frames)
    try:
        start = link.messages.get()
        assert isinstance(start, RankStart)
        loaded = build(start.payload, lambda done, total: link.send(Loading("weights", done, total, "B")))
        link.send(RankBuilt(loaded.payload))
        size = link.messages.get()
        assert isinstance(size, RankSize)
        running = loaded.size(size.payload)
        link.send(RankReady(running.payload))
        _serve(link, running, start)
    except Exception as error:  # any error: the engine core must tell the user
        link.fail(error)
        return 1
    return 0


def _serve(link: "_Link", running: RunningRank, start: RankStart) -> None:
    room = threading.Semaphore(running.depth)  # the core counts the steps of the leading rank; another may be slower
    steps: Steps = queue.SimpleQueue()
    watch = StepWatch(start.name, start.hang)
    with watch.looking():
        collector = threading.Thread(
            target=_collect,
            args=(link, running, start.lead, room, steps, watch),
            name="quire-rank-collect",
            daemon=True,
        )
        collector.start()
        while not isinstance(message := link.messages.get(), Stop):
            if isinstance(message, RankStep):
                room.acquire()
                watch.begin(partial(plan_words, message.plan))
                running.submit(message.plan)
                if not len(message.plan.grammar):
                    steps.put(True)
            elif isinstance(message, RankMasks):
                running.release(message.masks)
                steps.put(True)
            elif isinstance(message, RankControl):
                link.send(_control(running, message))
        steps.put(False)
        collector.join()
        running.close()


def _collect(
    link: "_Link", running: RunningRank, lead: bool, room: threading.Semaphore, steps: Steps, watch: StepWatch
) -> None:
    try:
        while steps.get():
            result = running.collect()
            watch.end()
            room.release()
            if lead:
                link.send(RankResult(result))
            elif result.copied or result.loaded or result.files:
                link.send(RankCopied(result.copied, result.loaded, result.files))
    except BaseException as error:  # also `SystemExit`, which would end only this thread
        link.fail(error)
        os._exit(1)


def _control(running: RunningRank, message: RankControl) -> RankReply:
    try:
        return RankReply(message.id, running.control(message.name, message.args))
    except UserError as error:
        return RankReply(message.id, error=failed(error))


class _Link:
    """The connection to the engine core, and the thread that reads it. Any thread may send."""

    def __init__(self, frames: Frames) -> None:
        self.messages: queue.SimpleQueue[ToRank] = queue.SimpleQueue()  # in the order of their arrival
        self._frames, self._parent = frames, os.getppid()
        self._beat = FIRST_BEAT_SECONDS  # between two beats
        self._next_beat = time.monotonic()
        threading.Thread(target=self._receive, name="quire-rank-receive", daemon=True).start()

    def send(self, message: FromRank) -> None:
        """Send a message to the engine core. Ends this process when the core is gone."""
        data = encode(message)
        try:
            self._frames.send(data)
        except OSError:
            os._exit(1)

    def fail(self, error: BaseException) -> None:
        """Tell the engine core by `RankFailed` that this rank ends because of `error`."""
        self.send(RankFailed(failed(error, begin=""), time.monotonic()))

    def _receive(self) -> None:
        try:
            poller = select.poll()
            poller.register(self._frames.fileno(), select.POLLIN)
            while True:
                if (wait := self._next_beat - time.monotonic()) <= 0:
                    # A process that was forked from the engine core's holds the socket open after the core's end.
                    if os.getppid() != self._parent:
                        break
                    self.send(RankBeat())
                    self._next_beat, wait = time.monotonic() + self._beat, self._beat
                if poller.poll(1000 * wait):
                    for data in self._frames.receive():
                        self._take(TO_RANK.decode(data))
        except EOFError:
            pass  # the engine core is gone
        except BaseException as error:
            self.fail(error)
        os._exit(1)  # ends the process also while the main thread computes

    def _take(self, message: ToRank) -> None:
        if isinstance(message, RankStart):
            self._beat, self._next_beat = message.beat, time.monotonic() + message.beat
        self.messages.put(message)  # first: the main thread begins while this one sends
        if isinstance(message, RankStep):
            self.send(RankReceived(message.plan.step))

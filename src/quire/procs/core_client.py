"""A front end's client of an engine core: starts the core, carries messages on the event loop, notices its death.

The client of the first front end starts the core and the processes of the other front ends, and watches all of them.
Knows sockets, messages and one running core. Decides nothing about requests.
"""

import asyncio
import logging
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.contracts.errors import EngineDead
from quire.procs.child_process import ChildProcess
from quire.procs.failures import failed
from quire.procs.front_ends import ALONE, MOST_RESTARTS, RESTART_SECONDS, FrontPlace, Restarts
from quire.procs.messages import Back, CoreStart, Dropped, FromCore, Gone, Stop, ToCore
from quire.procs.step_watch import HANG_SECONDS
from quire.procs.wire import FROM_CORE, encode

LOG = logging.getLogger("quire")
BURST = 16  # messages taken before other tasks of the event loop get their turn
WATCH_SECONDS = 0.2
STOPPED_SECONDS = 1.0  # a core that is stopped for so long counts as dead; a front end is told to the user
TOLD = float("inf")  # for a time: the user knows
LAST_WORDS_SECONDS = 0.1  # to wait for the last message of a core that has ended
STOP_SECONDS = 3.0  # to wait for a core to end by itself; its ranks have `RankTimes.stop`
MAX_FOLDER = 80  # a socket's path may have about 100 characters

LEAVE_SECONDS = 1.5  # to wait for the other front ends, which tell their clients that the server ends

Launch = Callable[[CoreStart], ChildProcess]
LaunchFront = Callable[[FrontPlace], ChildProcess]


class CoreClient:
    """Client of one engine core, for the life of a server. The callbacks run on the event loop that runs `start`.

    on_message   gets every message of the core, in order
    on_death     called once when the core ends without being asked to
    launch       starts the core's process
    place        place of the front end. Only the first one starts and ends processes
    more         starts the process of another front end at its place
    """

    def __init__(
        self,
        *,
        on_message: Callable[[FromCore], None],
        on_death: Callable[[EngineDead], None],
        launch: Launch,
        place: FrontPlace = ALONE,
        more: LaunchFront | None = None,
    ) -> None:
        self.core: ChildProcess | None = None
        self.place = place
        self._more, self._others, self._restarts = more, dict[FrontPlace, ChildProcess](), Restarts()
        self._on_message, self._on_death, self._launch = on_message, on_death, launch
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stopped: dict[FrontPlace, float] = {}  # front ends that are stopped, and since when
        self._connected = self._over = self._draining = False
        self._num_dropped = 0

    async def start(
        self, config: EngineConfig, *, hang_timeout: float = HANG_SECONDS, log_format: str = "text"
    ) -> FrontPlace:
        """Make the sockets and start the core. Return the place with their folder. A failed start frees everything.
        hang_timeout, log_format: see `CoreStart`"""
        try:
            self._open()
            if self.place.number:
                return self.place
            every = self.place.every()
            self.core = self._launch(
                CoreStart(
                    config=config,
                    to_core=self.place.to_core,
                    from_core=tuple(place.from_core for place in every),
                    hang_timeout=hang_timeout,
                    log_format=log_format,
                )
            )
            for place in every[1:]:
                assert self._more is not None
                self._others[place] = self._more(place)
        except BaseException:
            self._free()
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch(self.core))
        return self.place

    def send(self, message: ToCore) -> None:
        """Queue a message to the core without waiting. Call this only after the first message from the core."""
        assert self._connected, "a message was sent before the core's first message"
        if self._context is not None:
            self._sender.send(encode(message), zmq.NOBLOCK)

    def drain(self) -> None:
        """Ask the other front ends to let their requests finish, and to end. A second call: to end now."""
        for child in self._others.values():
            child.send_signal(signal.SIGINT if self._draining else signal.SIGTERM)
        self._draining = True

    def signal_others(self, number: signal.Signals) -> None:
        """Send a signal to the other front ends, which an operator sent to this one."""
        for child in self._others.values():
            child.send_signal(number)

    async def alone(self) -> None:
        """Wait until the other front ends have ended."""
        while any(child.ended() is None for child in self._others.values()):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Ask the core to end, kill the core if it does not, and free everything; idempotent."""
        self._over = True
        if self._context is None:
            return
        try:
            if self.core is not None:
                self._watcher.cancel()
                self.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.alone(), LEAVE_SECONDS)
                if self._connected and self.core.ended() is None and not self.core.stopped():
                    self.send(Stop())
                    await self._ended(self.core)
        finally:
            self._free()

    # --- inside -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self.place.folder:
            folder = tempfile.TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True)
            if len(folder.name) > MAX_FOLDER:
                folder.cleanup()
                folder = tempfile.TemporaryDirectory(prefix="quire-", dir="/tmp", ignore_cleanup_errors=True)
            self._folder, self.place = folder, msgspec.structs.replace(self.place, folder=folder.name)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._receiver, self._sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._receiver, self._sender):
            socket.set_hwm(0)
            socket.linger = 0
        self._receiver.bind(self.place.from_core)
        self._loop.add_reader(self._receiver.fileno(), self._receive)

    def _receive(self) -> None:
        """Take the messages that have arrived, all of them, in bursts.

        The socket's descriptor reports only new messages, so none may be left behind.
        """
        try:
            for _ in range(BURST):
                if self._context is None:
                    return
                try:
                    data = self._receiver.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_message(self._decoded(data))
                if self._context is None or not int(self._receiver.get(zmq.EVENTS)) & zmq.POLLIN:
                    return  # asking costs a quarter of a raised `Again`
        except Exception as fault:  # a fault of ours: no request may wait for ever
            LOG.exception("the front end cannot go on")
            self._die(f"the front end failed: {type(fault).__name__}: {fault}")
            return
        self._loop.call_soon(self._receive)

    def _decoded(self, data: bytes) -> FromCore:
        """Return the message in `data`, or `Dropped` when there is none. The first message connects to the core."""
        try:
            message = FROM_CORE.decode(data)
        except msgspec.DecodeError:
            self._num_dropped += 1
            return Dropped("from_core", self._num_dropped)
        if not self._connected:
            self._sender.connect(self.place.to_core)
            self._connected = True
        return message

    async def _watch(self, core: ChildProcess) -> None:
        stopped_at: float | None = None
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (how := core.ended()) is not None:
                await asyncio.sleep(LAST_WORDS_SECONDS)
                self._receive()
                return self._die(f"the engine process {how}.")
            self._watch_others()
            if not core.stopped():
                stopped_at = None
            elif stopped_at is None:
                stopped_at = time.monotonic()
            elif time.monotonic() - stopped_at >= STOPPED_SECONDS:
                return self._die("the engine process was stopped by a signal and is killed.")

    def _watch_others(self) -> None:
        """Notice a front end that has ended. The core ends its requests, the other front ends go on, and another one
        is started in its place."""
        for place, child in list(self._others.items()):
            self._watch_stopped(place, child)
            if self._connected and (how := child.ended()) is not None:
                del self._others[place]
                child.release()
                self._stopped.pop(place, None)
                self.send(Gone(place))
                if not self._draining:
                    self._tell_end(place, f"(pid {child.pid}) {how}: its clients have lost their connections")
        for place in [] if self._draining else self._restarts.due(time.monotonic()):
            assert self._more is not None
            try:
                child = self._others[place] = self._more(place)
            except OSError as fault:
                self._tell_end(place, f"cannot be started: {fault.strerror or fault}")
                continue
            self.send(Back(place))
            LOG.warning("HTTP process %d of %d is started again (pid %d).", place.number, place.count, child.pid)

    def _tell_end(self, place: FrontPlace, how: str) -> None:
        """Log the end of a front end, and let another one start later unless they end too often."""
        left, wait = len(self._others) + 1, self._restarts.ended(place, time.monotonic())
        often = f"It ended more than {MOST_RESTARTS} times in {RESTART_SECONDS:g} s: restart the server to get it back."
        LOG.error(
            "HTTP process %d of %d %s; %d %s on. %s",
            place.number,
            place.count,
            how,
            left,
            "goes" if left == 1 else "go",
            often if wait is None else f"It is started again in {wait:g} s.",
        )

    def _watch_stopped(self, place: FrontPlace, child: ChildProcess) -> None:
        """Log that a front end is stopped, and that it goes on. It may go on at any time, so it is not ended."""
        since = self._stopped.get(place)
        if not child.stopped():
            if self._stopped.pop(place, 0.0) == TOLD:
                LOG.warning("HTTP process %d of %d (pid %d) goes on.", place.number, place.count, child.pid)
        elif since is None:
            self._stopped[place] = time.monotonic()
        elif time.monotonic() - since >= STOPPED_SECONDS:
            self._stopped[place] = TOLD
            LOG.error(
                "HTTP process %d of %d (pid %d) is stopped (SIGSTOP, or a debugger): its clients wait, new "
                "connections go to the others. Let it go on (kill -CONT %d), or end it (kill -KILL %d).",
                place.number,
                place.count,
                child.pid,
                child.pid,
                child.pid,
            )

    def _die(self, message: str) -> None:
        if self.core is not None:
            self.core.kill()
        if not self._over:
            self._over = True
            self._tell_others(EngineDead(message))
            self._on_death(EngineDead(message))

    def _tell_others(self, error: EngineDead) -> None:
        """Tell the other front ends that the core is dead, in its place."""
        for place in self._others if self._context is not None else ():
            with self._context.socket(zmq.PUSH) as speaking:  # type: ignore[union-attr]
                speaking.linger = 1000 * int(LEAVE_SECONDS)
                speaking.connect(place.from_core)
                speaking.send(encode(failed(error)), zmq.NOBLOCK)

    async def _ended(self, core: ChildProcess) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while core.ended() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _free(self) -> None:
        for child in (*self._others.values(), *([self.core] if self.core is not None else [])):
            child.kill()
            child.release()
        context, self._context = self._context, None
        if context is not None:
            self._loop.remove_reader(self._receiver.fileno())
            self._receiver.close(0)
            self._sender.close(0)
            context.term()
            if self._folder is not None:
                self._folder.cleanup()

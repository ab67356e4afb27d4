"""A front end's client of an engine core: starts the core, carries messages on the event loop, notices its death.

The client of the first front end starts the core and the processes of the other front ends, and watches all of them.
Knows sockets, messages and one running core. Decides nothing about requests.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.contracts.errors import EngineDead
from quire.procs.child_process import ChildProcess
from quire.procs.core_restarts import SERVED_SECONDS, CoreRestarts, Offspring, sleeps
from quire.procs.front_ends import ALONE, MOST_RESTARTS, RESTART_SECONDS, FrontPlace, Restarts, remove_sockets
from quire.procs.messages import (
    Back,
    CoreStart,
    Dropped,
    Failed,
    FromCore,
    Gone,
    Lost,
    Ready,
    Stop,
    ToCore,
)
from quire.procs.server_folder import ServerFolder
from quire.procs.step_watch import HANG_SECONDS
from quire.procs.wire import FROM_CORE, encode

LOG = logging.getLogger("quire")
BURST = 16  # messages taken before other tasks of the event loop get their turn
WATCH_SECONDS = 0.2
STOPPED_SECONDS = 1.0  # a core that is stopped for so long counts as dead; a front end is told to the user
TOLD = float("inf")  # for a time: the user knows
LAST_WORDS_SECONDS = 0.1  # to wait for the last message of a core that has ended
STOP_SECONDS = 3.0  # to wait for a core to end by itself; its ranks have `RankTimes.stop`
LEAVE_SECONDS = 1.5  # to wait for the other front ends, which tell their clients that the server ends

Launch = Callable[[CoreStart], ChildProcess]
LaunchFront = Callable[[FrontPlace], ChildProcess]


class Heard(NamedTuple):
    """Functions to which a `CoreClient` tells what happens. They run on the event loop that runs `start`.

    message   gets every message of the core, in order
    death     called once when the core ends without being asked to, and no other one starts
    loss      called when the core has died, and another one will start; perhaps several times for one core
    front     called with the way in which another front end ended, before it is started again
    """

    message: Callable[[FromCore], None]
    death: Callable[[EngineDead], None]
    loss: Callable[[EngineDead], None]
    front: Callable[[str], None]


class CoreClient:
    """Client of one engine core, for the life of a server.

    launch       starts the core's process
    place        place of the front end. Only the first one starts and ends processes
    more         starts the process of another front end at its place
    restarts     times of dead cores
    """

    def __init__(
        self,
        heard: Heard,
        *,
        launch: Launch,
        place: FrontPlace = ALONE,
        more: LaunchFront | None = None,
    ) -> None:
        self.core: ChildProcess | None = None
        self.place = place
        self.restarts = CoreRestarts(0)
        self._more, self._others, self._restarts = more, dict[FrontPlace, ChildProcess](), Restarts()
        self._heard, self._launch = heard, launch
        self._last = dict[int, FrontPlace]()  # number -> place of the last process there
        self._offspring = Offspring()
        self._fault = ""  # that the core has told
        self._ready = False  # the core was; a core that never was ends the server
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._folder: ServerFolder | None = None
        self._stopped: dict[FrontPlace, float] = {}  # front ends that are stopped, and since when
        self._watcher: asyncio.Task[None] | None = None
        self._connected = self._over = self._draining = False
        self._num_dropped = 0

    async def start(
        self, config: EngineConfig, *, hang_timeout: float = HANG_SECONDS, log_format: str = "text"
    ) -> FrontPlace:
        """Make the sockets and start the core. Return the place with their folder. A failed start frees everything.
        hang_timeout, log_format: see `CoreStart`"""
        try:
            self._open()
            self.restarts.most = config.life.restart
            if self.place.number:
                return self.place
            self._last = {place.number: place for place in self.place.every()}
            start = CoreStart(config=config, places=(), hang_timeout=hang_timeout, log_format=log_format)
            self._start_core(start)
            for place in list(self._last.values())[1:]:
                self._start_front(place)
        except BaseException:
            self._free()
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch(start))
        self._watcher.add_done_callback(self._watched)
        return self.place

    def send(self, message: ToCore) -> None:
        """Queue a message to the core without waiting. Call this only after the first message from the core."""
        if self._context is not None and self.restarts.lost is None:
            assert self._connected, "a message was sent before the core's first message"
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
            if self._watcher is not None:
                self._watcher.cancel()
                self.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.alone(), LEAVE_SECONDS)
                if self._connected and self.core is not None and self.core.ended() is None and not self.core.stopped():
                    self._sender.send(encode(Stop()), zmq.NOBLOCK)
                    await self._ended(self.core)
        finally:
            self._free()

    # --- inside -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self.place.folder:
            self._folder = ServerFolder()
            self.place = msgspec.structs.replace(self.place, folder=self._folder.name)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._open_sockets()

    def _open_sockets(self) -> None:
        assert self._context is not None
        self._receiver, self._sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._receiver, self._sender):
            socket.set_hwm(0)
            socket.linger = 0
        self._receiver.bind(self.place.from_core)
        self._loop.add_reader(self._receiver.fileno(), self._receive)

    def _close_sockets(self) -> None:
        self._loop.remove_reader(self._receiver.fileno())
        self._receiver.close(0)
        self._sender.close(0)

    def _start_core(self, start: CoreStart) -> None:
        self.core = self._launch(msgspec.structs.replace(start, places=tuple(self._last.values())))

    def _start_front(self, place: FrontPlace) -> ChildProcess:
        assert self._more is not None
        self._last[place.number] = place
        child = self._others[place] = self._more(place)
        return child

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
                self._heed(self._decoded(data))
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
        if not self._connected and not isinstance(message, Lost):
            self._sender.connect(self.place.to_core)
            self._connected = True
            live = {self.place.number, *(place.number for place in self._others)}
            for number in self._last.keys() - live:  # they ended while there was no core
                self._tell_core(Gone(self._last[number]))
        return message

    def _heed(self, message: FromCore) -> None:
        """Pass a message on, unless it is about the end of a core that is started again."""
        if isinstance(message, Lost):
            if not message.core:
                return self._die(message.reason)
            self._lose(message.reason)
            return self._await_core(message.core)
        if isinstance(message, Failed) and (self._ready or self.restarts.count) and self.restarts.most:
            self._fault = f"{message.message.rstrip('.')}."
            return self._lose(self._fault) if not self.restarts.lost and not self._draining else None
        if isinstance(message, Ready):
            self.restarts.served(time.monotonic())
            self._ready = True
        self._heard.message(message)

    def _lose(self, reason: str) -> None:
        """Note the end of a core that another one follows."""
        self.restarts.lost = self.restarts.lost or time.monotonic()
        self._heard.loss(EngineDead(reason))

    def _await_core(self, core: int) -> None:
        """Wait for the messages of the next core, on sockets of its own."""
        self._close_sockets()
        left = [] if self.place.number else [self.place.to_core]  # by the dead core
        remove_sockets(self.place.from_core, *left)
        self.place, self._connected, self._fault = self.place.of_core(core), False, ""
        self._open_sockets()

    async def _watch(self, start: CoreStart) -> None:
        """Watch all processes, and start dead ones again as often as the user allows."""
        while True:
            words = await self._end_of_core()
            if not (self._ready and self.restarts.most) or self._draining or self._over:
                return self._die(words)
            reason = self._fault or words
            wait = self.restarts.ended(time.monotonic())
            if wait is None:
                return self._die(
                    f"{reason} It was started again {self.restarts.most} times (--restart), and has not served for "
                    f"{SERVED_SECONDS:g} s since."
                )
            LOG.error(
                "%s It is started again in %g s (%d of %d).", reason, wait, self.restarts.count, self.restarts.most
            )
            await self._start_again(start, reason, wait)
            if self._draining or self._over:
                return

    def _watched(self, done: "asyncio.Task[None]") -> None:
        """End the server when the watch has failed, by a fault of ours: no request may wait for ever."""
        if not done.cancelled() and (fault := done.exception()) is not None:
            LOG.error("the watch over the engine failed", exc_info=fault)
            self._die(f"the watch over the engine failed: {type(fault).__name__}: {fault}")

    async def _end_of_core(self) -> str:
        """Wait until the core has ended, or must be ended. Return the way of it, as a sentence."""
        core, stopped_at, told_at = self.core, 0.0, 0.0
        assert core is not None
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if (how := core.ended()) is not None:
                await asyncio.sleep(LAST_WORDS_SECONDS)
                self._receive()
                return f"the engine process {how}."
            self._watch_others()
            if self.restarts.lost is not None or not self._ready:  # it loads, and starts its ranks
                self._offspring.look(core.pid)
            stopped_at = (stopped_at or now) if core.stopped() else 0.0
            told_at = (told_at or now) if self._fault else 0.0
            if stopped_at and now - stopped_at >= STOPPED_SECONDS:
                return "the engine process was stopped by a signal and is killed."
            if told_at and now - told_at >= STOP_SECONDS:
                return "the engine process did not end after a fault, and is killed."

    async def _start_again(self, start: CoreStart, reason: str, wait: float) -> None:
        """Tell everybody that the core is dead, end what it has left, and start the next one after `wait` seconds."""
        core, due = self.core, time.monotonic() + wait
        assert core is not None
        core.kill()
        number = self.place.core + 1
        for place, child in self._others.items():
            if not Path(place.from_core.removeprefix("ipc://")).exists():
                child.kill()  # it does not listen yet, so it would miss the word; the next one knows
        self._tell_others(Lost(reason, number))
        self._others = {place.of_core(number): child for place, child in self._others.items()}
        self._stopped = {place.of_core(number): since for place, since in self._stopped.items()}
        self._last = {at: place.of_core(number) for at, place in self._last.items()}
        self._lose(reason)
        self._await_core(number)
        left = await self._gone(core)
        if left:
            LOG.error("processes %s of the dead engine do not end: its memory may not be free.", left)
        core.release()
        self.core, self._offspring = None, Offspring()
        while not self._draining:
            self._watch_others()
            if time.monotonic() >= due and not sleeps(self.place.folder):
                try:
                    return self._start_core(start)
                except OSError as fault:  # no memory for a process
                    if (wait := self.restarts.ended(time.monotonic())) is None:
                        return self._die(f"the engine process cannot be started: {fault.strerror or fault}.")
                    due = time.monotonic() + wait
            await asyncio.sleep(WATCH_SECONDS / 4)

    async def _gone(self, core: ChildProcess) -> list[int]:
        """Wait until the killed core and its ranks are gone. Return those that stay."""
        began = time.monotonic()
        while (left := self._offspring.left()) or core.ended() is None:
            waited = time.monotonic() - began
            if waited > LEAVE_SECONDS:  # ranks end by themselves, unless they are stopped
                self._offspring.kill()
            if waited > 2 * STOP_SECONDS:
                return left
            await asyncio.sleep(0.02)
        return []

    def _watch_others(self) -> None:
        """Notice a front end that has ended. The core ends its requests, the other front ends go on, and another one
        is started in its place."""
        if not self._connected and self.core is not None:
            return  # the core does not know the places yet
        for place, child in list(self._others.items()):
            self._watch_stopped(place, child)
            if (how := child.ended()) is not None:
                del self._others[place]
                child.release()
                self._stopped.pop(place, None)
                remove_sockets(place.from_core)
                self._tell_core(Gone(place))
                if not self._draining:
                    self._tell_end(place, f"(pid {child.pid}) {how}: its clients have lost their connections")
        for place in [] if self._draining else self._restarts.due(time.monotonic()):
            place = place.of_core(self.place.core)
            try:
                child = self._start_front(place)
            except OSError as fault:
                self._tell_end(place, f"cannot be started: {fault.strerror or fault}")
                continue
            self._tell_core(Back(place))
            LOG.warning("HTTP process %d of %d is started again (pid %d).", place.number, place.count, child.pid)

    def _tell_core(self, message: ToCore) -> None:
        """Send a message to a core that may still be loading; without one do nothing."""
        if self._connected:
            self._sender.send(encode(message), zmq.NOBLOCK)

    def _tell_end(self, place: FrontPlace, how: str) -> None:
        """Log the end of a front end, and let another one start later unless they end too often."""
        left, wait = len(self._others) + 1, self._restarts.ended(place, time.monotonic())
        if wait is not None:
            self._heard.front(how)
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
            self._tell_others(Lost(message))
            self._heard.death(EngineDead(message))

    def _tell_others(self, message: Lost) -> None:
        """Tell the other front ends that the core is dead, in its place."""
        for place in self._others if self._context is not None else ():
            with self._context.socket(zmq.PUSH) as speaking:  # type: ignore[union-attr]
                speaking.linger = 1000 * int(LEAVE_SECONDS)
                speaking.connect(place.from_core)
                speaking.send(encode(message), zmq.NOBLOCK)

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
            self._close_sockets()
            context.term()
            if self._folder is not None:
                self._folder.remove()

"""The life of a core: build it, then take what the front end sends, run a step, send what came of it.

Knows sockets, messages and one `EngineCore`. Knows nothing of processes, and not how the core is built.
"""

import logging
from collections.abc import Callable

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.contracts.errors import QuireError
from quire.engine.core import EngineCore
from quire.procs.failures import failed, rejected
from quire.procs.messages import (
    Abort,
    Add,
    Control,
    CoreStart,
    Dropped,
    FromCore,
    Loading,
    Outputs,
    Ready,
    Reply,
    Stop,
    ToCore,
)
from quire.procs.wire import decode_to_core, encode

LOG = logging.getLogger("quire")
LAST_WORDS_MS = 2000  # how long a core that ends waits for its last message to be taken

Receive = Callable[[bool], ToCore | None]  # whether to wait for a message -> the next one, None when there is none
Send = Callable[[FromCore], None]
Build = Callable[[EngineConfig, Send], tuple[EngineCore, Ready]]  # may send `Loading`


class CoreSockets:
    """The core's ends of two one-way sockets. Who reads one binds it and the other side connects, so that nothing that
    is sent gets lost or waits, whoever comes first. One thread uses them; every queue is unbounded."""

    def __init__(self, start: CoreStart) -> None:
        self._context = zmq.Context(io_threads=1)
        self._receiver, self._sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._receiver, self._sender):
            socket.set_hwm(0)
        self._num_dropped = 0
        self._receiver.bind(start.to_core)
        self._sender.connect(start.from_core)

    def receive(self, wait: bool) -> ToCore | None:
        """The next message; None when there is none and it is not to be waited for. What is no message is told as
        `Dropped`."""
        while True:
            try:
                return decode_to_core(self._receiver.recv(0 if wait else zmq.NOBLOCK))
            except zmq.Again:
                return None
            except msgspec.DecodeError:
                self._num_dropped += 1
                self.send(Dropped("to_core", self._num_dropped))

    def send(self, message: FromCore) -> None:
        """Queue a message; never waits."""
        self._sender.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Give the last message a moment to leave, then free everything."""
        self._receiver.close(0)
        self._sender.close(LAST_WORDS_MS)
        self._context.term()


def run_core(start: CoreStart, build: Build) -> int:
    """Build a core and serve it: `Loading`, then `Ready` or `Failed`. Returns the exit code of the process."""
    sockets = CoreSockets(start)
    try:
        sockets.send(Loading("starting"))  # the front end connects when it hears from us
        try:
            core, ready = build(start.config, sockets.send)
        except Exception as error:  # whatever keeps it from starting, the other side has to say it to the user
            message = failed(error)
            if message.details:
                LOG.error("the engine cannot start", exc_info=error)
            sockets.send(message)
            return 1
        sockets.send(ready)
        try:
            return serve_core(core, sockets.receive, sockets.send)
        finally:
            core.shutdown()
    finally:
        sockets.close()


def serve_core(core: EngineCore, receive: Receive, send: Send) -> int:
    """Serve until `Stop` (returns 0) or until a step fails (sends `Failed`, returns 1): the exit code of the process.

    All messages that have arrived are taken between two steps; every step's outputs are sent, also when they are
    empty. Without work it waits in `receive`.
    """
    try:
        while True:
            while (message := receive(not core.has_work)) is not None:
                if isinstance(message, Stop):
                    return 0
                _obey(core, message, send)
            send(Outputs(core.step()))
    except Exception as fault:  # whatever it is, every waiting client must hear of it
        LOG.error("the engine stopped", exc_info=fault)
        send(failed(fault))
        return 1


def _obey(core: EngineCore, message: ToCore, send: Send) -> None:
    if isinstance(message, Add):
        _add(core, message, send)
    elif isinstance(message, Abort):
        for handle in message.handles:
            core.abort(handle)
    elif isinstance(message, Control):
        send(_control(core, message))


def _add(core: EngineCore, message: Add, send: Send) -> None:
    """Take the requests of one prompt, or none of them."""
    taken: list[int] = []
    try:
        for new in message.requests:
            core.add(new, places=len(message.requests))
            taken.append(new.handle)
    except Exception as error:  # whatever is wrong with one prompt is its caller's alone
        if not isinstance(error, QuireError):
            LOG.error("request %s could not be taken", message.requests[0].request_id, exc_info=error)
        for handle in taken:
            core.abort(handle)
        send(rejected(tuple(new.handle for new in message.requests), error))


def _control(core: EngineCore, message: Control) -> Reply:
    try:
        if message.name == "reset_prefix_cache":
            return Reply(message.id, core.reset_prefix_cache())
        if message.name == "plan":
            return Reply(message.id, _plan(core))
        if message.name == "check":  # the bookkeeping, and that an idle core holds nothing
            core.check()
            return Reply(message.id, True)
    except Exception as error:  # the caller of a control hears of its failure; the engine goes on
        LOG.error("control %s failed", message.name, exc_info=error)
        return Reply(message.id, error=f"{type(error).__name__}: {error}")
    return Reply(message.id, error=f"unknown control {message.name!r}")


def _plan(core: EngineCore) -> str:
    """What was decided when the engine started, and what its runner does now, as JSON."""
    plan, runner = (core.facts.plans.get(name) for name in ("engine", "runner"))
    return "null" if plan is None else f'{str(plan)[:-1]},"runner":{runner or "null"}}}'

"""The main loop of an engine core's process: build the core, then take messages, run a step, send its outputs.

Knows sockets, messages and one `EngineCore`. Knows nothing of processes, nor of how the core is built.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.contracts.adapters import Adapter
from quire.contracts.errors import EngineDead, QuireError, UserError
from quire.engine.replicas import Core, Replicas, check_adapter, flush
from quire.procs.block_map import block_map
from quire.procs.failures import failed, rejected
from quire.procs.front_ends import FrontPlace, owner, parts
from quire.procs.hang_note import note_hang
from quire.procs.life import Life
from quire.procs.live_feed import LiveFeed
from quire.procs.messages import (
    Abort,
    Add,
    Back,
    Control,
    CoreStart,
    Dropped,
    FromCore,
    Gone,
    Loading,
    NextFrame,
    Outputs,
    Ready,
    Rejected,
    Reply,
    Stop,
    ToCore,
    Watched,
)
from quire.procs.request_trace import TRACE, RequestTrace
from quire.procs.step_profile import PROFILE, StepProfile
from quire.procs.step_watch import HANG_SECONDS, StepWatch, plan_words
from quire.procs.wire import TO_CORE, encode

LOG = logging.getLogger("quire")
LAST_WORDS_MS = 2000  # a core that ends waits so long for its last message to be taken
IDLE_MS = 500  # between two looks of an idle core at its executor

Receive = Callable[[bool], ToCore | None]  # True: wait a moment for a message -> the next message, None without one
Send = Callable[[FromCore], None]
Build = Callable[[EngineConfig, Send], tuple[Core, Ready]]  # may send `Loading`


class CoreSockets:
    """The core's ends of one-way ZeroMQ sockets: to the core, and from it to each front end. For one thread; queues are
    unbounded. A front end gets what belongs to its requests and operations, and all that is for everybody.

    The reader of a socket binds it and the writer connects, so no message is lost, whichever process starts first.
    """

    def __init__(self, start: CoreStart) -> None:
        self._context = zmq.Context(io_threads=1)
        self._receiver = self._context.socket(zmq.PULL)
        self._places = {place.number: place for place in start.places}
        self._senders = {number: self._context.socket(zmq.PUSH) for number in self._places}
        self._count = len(self._senders)
        self._ready = b""
        for socket in (self._receiver, *self._senders.values()):
            socket.set_hwm(0)
        self._num_dropped = 0
        self._receiver.rcvtimeo = IDLE_MS
        self._receiver.bind(start.places[0].to_core)
        for number, place in self._places.items():
            self._senders[number].connect(place.from_core)

    def receive(self, wait: bool) -> ToCore | None:
        """Return the next message to the core, or None. With `wait`, wait up to `IDLE_MS` milliseconds for a message.

        Bytes that are not a message are skipped, and the front end gets a `Dropped`.
        """
        while True:
            try:
                message = TO_CORE.decode(self._receiver.recv(0 if wait else zmq.NOBLOCK))
                if isinstance(message, Gone) and (sender := self._senders.pop(message.place.number, None)) is not None:
                    sender.close(0)
                if isinstance(message, Back):
                    self._welcome(message.place)
                    continue
                if isinstance(message, Add) and not self._expected(message.requests[0].handle):
                    continue  # it waited in the socket of a process that is gone, behind the word that it is
                return message
            except zmq.Again:
                return None
            except msgspec.DecodeError:
                self._num_dropped += 1
                self.send(Dropped("to_core", self._num_dropped))

    def send(self, message: FromCore) -> None:
        """Queue a message to the front ends that it concerns, without waiting."""
        if isinstance(message, Outputs) and self._count > 1:
            for number, part in enumerate(parts(message.step, self._count)):
                self._send(number, encode(Outputs(part)))
            return
        data: bytes = encode(message)
        if isinstance(message, Ready):
            self._ready = data
        every: Sequence[int] = message.places if isinstance(message, Watched) else range(self._count)
        if isinstance(message, Rejected | Reply):
            number = owner(message.handles[0] if isinstance(message, Rejected) else message.id, self._count)
            every = range(number, number + 1)
        for number in every[:1] if isinstance(message, Dropped) else every:
            self._send(number, data)

    def _welcome(self, place: FrontPlace) -> None:
        """Connect to the front end that is at this place from now on."""
        self._places[place.number] = place
        sender = self._senders[place.number] = self._context.socket(zmq.PUSH)
        sender.set_hwm(0)
        sender.connect(place.from_core)
        sender.send(self._ready, zmq.NOBLOCK)

    def _expected(self, handle: int) -> bool:
        """Return True if the front end that makes requests with this handle has not ended."""
        place = self._places[owner(handle, self._count)]
        return place.number in self._senders and place.first <= handle < place.end

    def _send(self, number: int, data: bytes) -> None:
        if (sender := self._senders.get(number)) is not None:
            sender.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        """Wait up to 2 s until the front ends have taken the last message, then free the sockets."""
        self._receiver.close(0)
        for sender in self._senders.values():
            sender.close(LAST_WORDS_MS)
        self._context.term()


def run_core(start: CoreStart, build: Build) -> int:
    """Build an engine core and run its loop until it ends. Returns the exit code of the process.

    The front end gets `Loading` messages, then `Ready`, or `Failed` when the core cannot be built.
    """
    sockets = CoreSockets(start)
    try:
        sockets.send(Loading("starting"))  # the front end connects when it hears from us
        try:
            core, ready = build(start.config, sockets.send)
        except Exception as error:  # any error: the front end must tell the user
            _log("the engine cannot start", error)
            sockets.send(failed(error))
            return 1
        sockets.send(ready)
        try:
            watch = StepWatch("the engine", start.hang_timeout, partial(note_hang, start.places[0]))
            with watch.looking():
                return serve_core(core, sockets.receive, sockets.send, watch, renews=start.config.life.restart > 0)
        finally:
            core.shutdown()
    finally:
        sockets.close()


def serve_core(
    core: Core, receive: Receive, send: Send, watch: StepWatch | None = None, *, renews: bool = False
) -> int:
    """Run the core's loop until a `Stop` message (returns 0) or a failed step (sends `Failed`, returns 1).

    Between two steps the loop handles all messages that have arrived. It sends the outputs of every step, even empty
    ones, a frame of the live view when one is due, and a trace or a profile when it is complete. Without requests it
    waits for messages, and checks every 0.5 s that the executor is alive. `watch` is told of every step.

    renews: another core follows this one, so that it ends when it has no request and lacks a replica
    """
    watch, in_flight = watch or StepWatch("the engine", HANG_SECONDS), partial(_in_flight, core)
    feed, trace, profile = LiveFeed(core, send), RequestTrace(core, send), StepProfile(core, send)

    def step() -> None:
        begun = time.time_ns() if profile.active else 0
        outputs = watch.run(core.step, in_flight)
        send(Outputs(outputs))
        if profile.active:
            profile.stepped(begun, outputs.stats)

    life = Life(core, step)
    try:
        while True:
            while (message := receive(not core.has_work)) is not None:
                if isinstance(message, Stop):
                    flush(core)
                    return 0
                if isinstance(message, NextFrame):
                    feed.ask(message.place)
                elif isinstance(message, Control) and message.name == TRACE:
                    trace.ask(message, busy=profile.active)
                elif isinstance(message, Control) and message.name == PROFILE:
                    profile.ask(message, busy=trace.active)
                else:
                    if trace.active and isinstance(message, Add):
                        trace.begin(message)
                    _obey(core, life, message, send)
            if not core.has_work:
                core.executor.check_alive()
                if renews and not core.handles and isinstance(core, Replicas) and len(core.live) < len(core.cores):
                    raise EngineDead(
                        "rank that died before: no request runs now, so its replica comes back with all others."
                    )
            if core.has_work or (life.held and core.handles):  # requests that are held hear that the core is alive
                step()
            if feed.active:
                feed.tell()
            if trace.active:
                trace.tell()
            if profile.active:
                profile.tell()
    except Exception as fault:  # any fault: every waiting client must be told
        _log("the engine stopped", fault)
        send(failed(fault))
        return 1


def _in_flight(core: Core) -> str:
    """Name the steps in flight."""
    cores = core.live if isinstance(core, Replicas) else [core]
    return ", ".join(plan_words(one.plan) for each in cores for one in tuple(each.in_flight)) or "a step"


def _log(words: str, error: Exception) -> None:
    """Log an error with its traceback, unless its message says all: a user's error, or the end of a rank."""
    if not isinstance(error, UserError) and not (isinstance(error, EngineDead) and error.__cause__ is None):
        LOG.error(words, exc_info=error)


def _obey(core: Core, life: Life, message: ToCore, send: Send) -> None:
    if isinstance(message, Add):
        _add(core, life, message, send)
    elif isinstance(message, Abort):
        for handle in message.handles:
            core.abort(handle, message.cause)
    elif isinstance(message, Gone):
        for handle in core.handles:
            if message.place.first <= handle < message.place.end:
                core.abort(handle)
    elif isinstance(message, Control):
        send(_control(core, life, message))


def _add(core: Core, life: Life, message: Add, send: Send) -> None:
    """Take the requests of one prompt, or none of them."""
    taken: list[int] = []
    try:
        life.check()
        for new in message.requests:
            core.add(new, places=len(message.requests))
            taken.append(new.handle)
    except Exception as error:  # any error of a prompt fails only that prompt
        if not isinstance(error, QuireError):
            LOG.error("request %s could not be taken", message.requests[0].request_id, exc_info=error)
        for handle in taken:
            core.abort(handle)
        send(rejected(tuple(new.handle for new in message.requests), error))


def _control(core: Core, life: Life, message: Control) -> Reply:
    try:
        if operation := life.operations.get(message.name):
            return Reply(message.id, operation(**message.args))
        if handler := HANDLERS.get(message.name):
            return Reply(message.id, handler(core, **message.args))
        value = core.executor.control(message.name, message.args)
        return Reply(message.id, msgspec.json.encode(value).decode())
    except Exception as error:  # the caller is told; the engine goes on
        if isinstance(error, QuireError):
            return Reply(message.id, error=str(error))
        LOG.error("control %s failed", message.name, exc_info=error)
        return Reply(message.id, error=f"{type(error).__name__}: {error}")


def _plan(core: Core) -> str:
    """Return the plan made at the engine's start, and the state of its runner, as JSON."""
    plan = core.facts.plans.get("engine")
    if plan is None:
        return "null"
    runner = msgspec.json.encode(core.executor.control("describe", {})).decode()
    return f'{str(plan)[:-1]},"runner":{runner}}}'


def _check(core: Core) -> bool:
    """Check the bookkeeping, and that an idle core holds nothing. Raises AssertionError."""
    core.check()
    return True


def _check_adapter(core: Core, name: str, folder: str, digest: str) -> str:
    """Return the reason why an adapter does not fit the model; "": it does."""
    try:
        check_adapter(core, Adapter(name, folder, digest))
    except UserError as error:
        return str(error)
    return ""


HANDLERS: Mapping[str, Callable[..., bool | str]] = {
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "plan": _plan,
    "blocks": block_map,
    "check": _check,
    "check_adapter": _check_adapter,
}

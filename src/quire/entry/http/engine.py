"""The engine in the HTTP process: starts the core's process, sends it requests, hands its outputs to their readers.

Everything here runs on one event loop. The outputs of a step are handed out in one pass. Outputs of readers that can
take them without waiting are sent in the same pass; streams have no timers. A slow reader delays nobody: it gets
several tokens at once later. Knows nothing of HTTP; never imports torch.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.config.serve import DeadlineConfig, ServerConfig
from quire.contracts import errors
from quire.contracts.request import NO_ACCOUNT, Account
from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.front_end import INTERNAL, FrontEnd, Taken
from quire.entry.http.access.room import check_room
from quire.entry.http.deadlines import FIRST_TOKEN, QUEUE, Deadlines, late_cause, too_late
from quire.entry.http.life.pending import PendingOperations
from quire.entry.http.life.state import EngineState
from quire.entry.http.life.unsent import Unsent
from quire.entry.http.lora.served import ServedAdapters, checked
from quire.entry.http.observed.request_metrics import (
    count_dropped,
    count_finished,
    count_refusal,
    count_step,
    note_ready,
    request_record,
)
from quire.entry.http.request_stream import RequestStream
from quire.entry.http.web.live_hub import LiveHub
from quire.entry.obtain import core_config, obtain_model
from quire.entry.prompts import Prompt
from quire.observe.metrics import Metrics
from quire.procs import messages
from quire.procs.child_process import ChildProcess
from quire.procs.core_client import CoreClient, Heard, Launch, LaunchFront
from quire.procs.failures import rebuilt
from quire.procs.front_ends import ALONE, FrontPlace
from quire.procs.hang_note import hung_since
from quire.procs.parent import start_line
from quire.text.load import TextSide, load_text
from quire.text.output_styles import choose_styles

LOG = logging.getLogger("quire")
CORE_MODULE = "quire.entry.core_process"
RECENT = 256  # finished prompts kept for /debug/requests
NO_CHAT = "the model has no chat template (a base model?): /v1/completions works, chats need --chat-template"


class ServedEngine:
    """An engine core and the requests that wait for it. All methods are called on the event loop of `start`.

    launch               function that starts the core (default: in its own process)
    place, more          place among the front ends of the core; function that starts another front end
    config               the engine's configuration
    text, ready, front   tokenizer and chat template, the core's message, the front end; None until all is loaded
    loading              last message about the progress of loading
    warm_up              called before the first request is taken, with a function that takes progress
    signal_others        function that sends a signal to the other front ends
    live, adapters       the watchers of the live view; the adapters by name
    failure              reason of the state DEAD: the engine could not start, died or was closed
    loss                 reason of the state RESTARTING, a sentence
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        metrics: Metrics,
        launch: Launch | None = None,
        place: FrontPlace = ALONE,
        more: LaunchFront | None = None,
    ) -> None:
        self._bound = config.max_waiting
        self.config = replace(config.engine, scheduler=replace(config.engine.scheduler, max_waiting=self._bound))
        self.state = EngineState.STARTING
        self.text: TextSide | None = None
        self.ready: messages.Ready | None = None
        self.front: FrontEnd | None = None
        self.failure: errors.QuireError | None = None
        self._serve, self._timeouts, self._metrics = config.serve, config.deadlines, metrics
        self._log_format = config.log.log_format
        self.adapters = ServedAdapters(config, partial(checked, self.control))
        launch = launch or (lambda start: ChildProcess(CORE_MODULE, start_line(start)))
        heard = Heard(self._take, self._die, self._lose, partial(metrics.restarts.ended, "http"))
        self._client = CoreClient(heard, launch=launch, place=place, more=more)
        self.loss = ""
        self._unsent = Unsent(on=config.engine.life.restart > 0)
        self.signal_others = self._client.signal_others
        self.loading = messages.Loading("starting")
        self._on_loading: Callable[[messages.Loading], None] = lambda message: None
        self.warm_up: Callable[[Callable[[messages.Loading], None]], Awaitable[None]] | None = None
        self._starting: asyncio.Future[messages.Ready] | None = None
        self._live: dict[int, tuple[RequestStream, int]] = {}  # first handle -> stream, prompt index
        self._deadlines = Deadlines(self._late)
        self._recent: deque[tuple[str, dict[str, object]]] = deque(maxlen=RECENT)  # (tenant, record)
        self._operations = PendingOperations(self._client.send, place.first)
        self.live = LiveHub(lambda: self._client.send(messages.NextFrame(place.number)), lambda: self.requests(None))
        self._idle, self._dead = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._last_sign = 0.0  # monotonic time of the core's last outputs, or when an idle core got a request

    @property
    def num_live(self) -> int:
        """Number of prompts that have not finished."""
        return len(self._live)

    @property
    def last_step_age(self) -> float | None:
        """Seconds since the core's last outputs, or of its step that hangs; None when no prompt is live here, and no
        step hangs."""
        sign = min(hung_since(self._client.place), self._last_sign if self._live else math.inf)
        return None if sign == math.inf else time.monotonic() - sign

    def requests(self, tenant: str | None = "") -> list[dict[str, object]]:
        """Return records of a tenant's live prompts, then of its last finished ones. In both the newest comes first.
        tenant: None = those of all tenants"""
        live = [stream.generations[i] for stream, i in reversed(self._live.values())]
        live = [generation for generation in live if tenant in (None, generation.tenant)]
        states = ["waiting" if generation.began is None else "running" for generation in live]
        ended = [record for owner, record in reversed(self._recent) if tenant in (None, owner)]
        return [*map(request_record, live, states), *ended]

    async def start(self, on_loading: Callable[[messages.Loading], None]) -> messages.Ready:
        """Find the model, then load tokenizer and chat template while the core starts. Return the core's `Ready`.
        If the start fails, close everything and raise the error. An error of the core's process keeps its class."""
        self._on_loading = on_loading
        starting: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._starting = starting
        try:
            serve = self._serve
            choose_styles(None, serve.tool_call_parser, serve.reasoning_parser)  # fails early
            self._take(messages.Loading("model files"))
            folder, tokenizer_folder = await asyncio.to_thread(obtain_model, self.config)
            if self.failure is not None:  # closed meanwhile
                raise self.failure
            self.place = await self._client.start(
                core_config(self.config), hang_timeout=serve.hang_timeout, log_format=self._log_format
            )
            loading = asyncio.to_thread(load_text, self.config, folder, tokenizer_folder=tokenizer_folder, apart=True)
            text, ready = await asyncio.gather(loading, starting)
            text = text.with_parsers(serve.tool_call_parser, serve.reasoning_parser, serve.default_chat_template_kwargs)
            note = text.styles.why if text.chat_template is not None else NO_CHAT
            self.text, self.ready = text, (ready := msgspec.structs.replace(ready, notes=(*ready.notes, note)))
            self.front = self._front_of(text, ready)
            await self.adapters.start()
            note_ready(self._metrics, ready, self.config, self._client.core)
            if self.warm_up is not None:
                await self.warm_up(self._take)
        except BaseException as error:
            starting.cancel()
            words = f"the engine was not started ({type(error).__name__})."
            self._die(error if isinstance(error, errors.QuireError) else errors.EngineClosed(words))
            await self._client.close()
            raise
        self.state = EngineState.READY
        return ready

    def _front_of(self, text: TextSide, ready: messages.Ready) -> FrontEnd:
        return FrontEnd.of(self.config, ready, text.tokenizer, text.eos_ids, self.place, width=text.pooling.width)

    def open(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        timeout: float | None = None,
        pool: str = "",
        account: Account = NO_ACCOUNT,
        deadlines: DeadlineConfig | None = None,
    ) -> RequestStream:
        """Send all prompts of one request to the core, or none. Return their stream of outputs; the caller closes it.

        timeout   seconds for the whole request; the limit of `deadlines` applies, too
        pool      pooling of an embedding request: "mean", "last" or "cls"; "" = the request generates text
        account   API key of the request, as the core sees it
        deadlines   time limits of the request; None: those of the server
        Raises a `RequestError` when a prompt cannot be served, an `EngineError` when the engine takes no requests.
        """
        deadlines = deadlines or self._timeouts
        limits = [t for t in (timeout, deadlines.request_timeout) if t is not None]
        stream = RequestStream(request_id, self._abandon)
        requests = []
        try:
            front = self._open_front()
            assert self.ready is not None
            check_room(len(prompts), params, len(front), self.ready.num_slots, self._bound)
            for i, prompt in enumerate(prompts):
                generation, new = front.start(
                    prompt,
                    params,
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
                    priority=priority,
                    timeout=min(limits, default=None),
                    pool=pool,
                    account=account,
                )
                stream.generations.append(generation)
                requests.append(new)
        except Exception as error:
            for generation in stream.generations:
                front.drop(generation)
            if isinstance(error, errors.QuireError):
                raise
            LOG.exception("request %s could not be started", request_id)
            raise errors.RequestFailed(
                f"request {request_id} was not started (internal error): the server's log has "
                "its cause; report it with the request id.",
                code=INTERNAL,
            ) from error
        self._admit(stream, [messages.Add(tuple(new)) for new in requests], deadlines)
        return stream

    async def control(self, name: str, /, **args: Any) -> bool | int | str | None:
        """Run a `messages.Control` operation in the core between two steps. Return its value or raise `EngineError`."""
        self._open_front(draining=True)
        return await self._operations.run(name, args)

    def drain(self) -> None:
        """Take no new requests, here and in the other front ends. Running requests go on."""
        if self.state in (EngineState.READY, EngineState.RESTARTING):
            if self.state is EngineState.RESTARTING:
                self._fail_all(errors.EngineClosed("the server is shutting down."), "shutdown")
            self.state = EngineState.DRAINING
            self.live.drain(self._serve.shutdown_timeout)
            self._client.drain()

    async def wait_idle(self) -> None:
        """Wait until no prompt is live, and the other front ends have ended."""
        await self._idle.wait()
        await self._client.alone()

    async def closed(self) -> errors.QuireError:
        """Wait until the engine is dead. Return the reason."""
        await self._dead.wait()
        assert self.failure is not None
        return self.failure

    async def close(self) -> None:
        """End every stream with `EngineClosed`, stop the core and free everything; idempotent."""
        self._die(errors.EngineClosed("the server is shutting down."))
        await self._client.close()

    # --- requests come and go -----------------------------------------------------------------------------------

    def _open_front(self, *, draining: bool = False) -> FrontEnd:
        """Return the front end. Raises an `EngineError` when no requests are taken now."""
        if self.failure is not None:
            raise rebuilt(type(self.failure).__name__, str(self.failure))
        if self.front is None:
            raise errors.EngineStarting("the engine is being loaded: try again in a few seconds.")
        if self.state is EngineState.RESTARTING:
            raise errors.EngineStarting(f"{self.loss} It is started again: try again in a few seconds.")
        if self.state is EngineState.DRAINING and not draining:
            raise errors.EngineClosed("the server is shutting down and takes no new requests: try again later.")
        return self.front

    def _admit(self, stream: RequestStream, adds: Sequence[messages.Add], deadlines: DeadlineConfig) -> None:
        now = time.monotonic()
        if not self._live:
            self._last_sign = now
        stream.num_open = len(stream.generations)
        for i, generation in enumerate(stream.generations):
            self._live[generation.completions[0].handle] = (stream, i)
            self._metrics.request_started(generation.params)
        if adds:
            self._idle.clear()
            self._deadlines.begin(stream, deadlines)
            self._unsent.hold(stream, adds)
        for add in adds:
            self._client.send(add)

    def _abandon(self, stream: RequestStream) -> None:
        """Abort a stream that its reader closed, since the client has left or an output could not be made."""
        if stream.num_open:
            self._abort(stream, stream.cause or "disconnect")

    def _abort(self, stream: RequestStream, cause: str | None) -> None:
        """End the unfinished prompts of a stream, here and in the core.
        `cause`: for the metrics; None = the core refused the request."""
        assert self.front is not None
        stream.cause = cause or ""
        self._deadlines.end(stream)
        self._unsent.drop(stream)
        dropped: list[int] = []
        for generation in stream.generations:
            if self._live.pop(generation.completions[0].handle, None) is not None:
                dropped += self.front.drop(generation)
                if cause is not None:
                    self._count_end(generation, "abort", cause)
        stream.num_open = 0
        if dropped and self.state is not EngineState.DEAD:
            self._client.send(messages.Abort(tuple(dropped), stream.cause))
        if cause == late_cause(QUEUE):  # no step had it: a refusal
            self._metrics.rejected(cause)
        elif cause is not None:
            self._metrics.aborted(cause)
        self._tell_idle()

    def _fail(self, stream: RequestStream, error: errors.QuireError, cause: str | None) -> None:
        self._abort(stream, cause)
        stream.fail(error)

    def _late(self, stream: RequestStream, kind: str, seconds: float) -> None:
        """End a stream that waited too long for its start or its first token."""
        self._fail(stream, too_late(stream.request_id, kind, seconds), late_cause(kind))

    # --- what the core says -------------------------------------------------------------------------------------

    def _take(self, message: messages.FromCore) -> None:
        if isinstance(message, messages.Outputs):
            self._take_outputs(message)
        elif isinstance(message, messages.Watched):
            self.live.take(message.frame)
        elif isinstance(message, messages.Rejected):
            self._take_rejection(message)
        elif isinstance(message, messages.Reply):
            self._operations.take(message)
        elif isinstance(message, messages.Loading):
            self.loading = message
            self._on_loading(message)
        elif isinstance(message, messages.Ready):
            if self._starting is not None and not self._starting.done():
                self._starting.set_result(message)
            elif self.state is EngineState.RESTARTING:
                self._go_on(message)
        elif isinstance(message, messages.Dropped):
            count_dropped(self._metrics, message)
        elif isinstance(message, messages.Failed):
            self._die(rebuilt(message.kind, message.message))  # the core has logged the details

    def _take_outputs(self, message: messages.Outputs) -> None:
        if self.front is None or self.state is EngineState.DEAD:
            return
        step, live = message.step, self._live
        taken = self.front.take(step)
        self._last_sign = taken.now
        if step.cached:
            began = taken.now - step.stats.execute_s - step.stats.finish_s  # start of the step
            for handle in step.cached:
                if (found := live.get(handle)) is not None:
                    self._deadlines.end(found[0], QUEUE)
                    found[0].generations[found[1]].began = began
        for generation in taken.started:
            if (found := live.get(generation.completions[0].handle)) is not None:
                self._deadlines.end(found[0], FIRST_TOKEN)
                self._unsent.drop(found[0])
        streams: dict[RequestStream, None] = {}
        for generation in taken.touched:
            if (found := live.get(generation.completions[0].handle)) is not None:
                found[0].mark(found[1])
                streams[found[0]] = None
        if taken.stopped:
            self._client.send(messages.Abort(tuple(taken.stopped)))
        count_step(self._metrics, step, taken)
        if taken.finished:
            self._finish(taken)
        for stream in streams:
            stream.tell()

    def _finish(self, taken: Taken) -> None:
        for generation in taken.finished:
            found = self._live.pop(generation.completions[0].handle, None)
            if found is not None:
                self._deadlines.end(found[0])
                self._unsent.drop(found[0])
                found[0].end_one(found[1])
                reason, cause = generation.ending()
                if cause:
                    self._metrics.aborted(cause)
                self._count_end(generation, reason, cause)
        self._tell_idle()

    def _count_end(self, generation: Generation, reason: str, cause: str) -> None:
        count_finished(self._metrics, generation, reason)
        self._recent.append((generation.tenant, request_record(generation, reason, cause)))

    def _take_rejection(self, message: messages.Rejected) -> None:
        found = self._live.get(message.handles[0])
        if found is not None:
            error = rebuilt(message.kind, message.message, message.param)
            count_refusal(self._metrics, error)
            self._fail(found[0], error, None)

    def _die(self, error: errors.QuireError) -> None:
        """Set the state DEAD and end every waiting stream and call with the error. Later calls have no effect."""
        if self.failure is not None:
            return
        self.state, self.failure = EngineState.DEAD, error
        self.live.end(str(error))
        self._deadlines.close()
        closed = isinstance(error, errors.EngineClosed)
        self._fail_all(error if closed else errors.EngineDead(str(error)), "shutdown" if closed else "engine")
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(error)
        self._dead.set()

    def _fail_all(
        self, error: errors.QuireError, cause: str, kept: Callable[[RequestStream], bool] | None = None
    ) -> None:
        """End all streams with an error, but for those that are kept, and all operations."""
        for stream in dict.fromkeys(stream for stream, _ in self._live.values()):
            if kept is None or not kept(stream):
                self._fail(stream, type(error)(str(error)), cause)
        self._operations.fail(error)

    def _lose(self, error: errors.EngineDead) -> None:
        """The core has died, and another one follows. End the requests whose first token has come; others wait."""
        if self.state is EngineState.DRAINING or (self.state is EngineState.STARTING and self.front is not None):
            return self._die(error)
        if self.state is EngineState.READY:
            self.state, self.loss, self.loading = EngineState.RESTARTING, str(error), messages.Loading("waiting")
            self._metrics.engine_lost(lambda: self._unsent.num_requests)
            if self.place.number == 0:
                self._metrics.restarts.lost(self.loss)
            words = f"{error} It is started again: send the request again."
            self._fail_all(errors.EngineDead(words), "engine", self._unsent.keeps)

    def _go_on(self, ready: messages.Ready) -> None:
        """Serve with the next core."""
        assert self.front is not None and self.text is not None and self.ready is not None
        self.ready = msgspec.structs.replace(ready, notes=self.ready.notes)
        self.front.limits = self._front_of(self.text, self.ready).limits
        self._last_sign = time.monotonic()
        note_ready(self._metrics, self.ready, self.config, self._client.core)
        self.state = EngineState.READY
        for add in self._unsent.adds():
            self._client.send(add)
        self.live.go_on()

    def _tell_idle(self) -> None:
        if not self._live:
            self._idle.set()

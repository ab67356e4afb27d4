"""A trace of one request, in the core's process: the calls of its steps in the core, and in every model runner.

It is the next request of a tenant, or one that lives. Nothing is replaced until a front end has asked and the request
is there. Then the calls of the core are recorded, and those of the model runners from the first step on in which the
request takes part (`Executor.control`, "trace"). Meanwhile such steps run eagerly. Everything is put back after
`MOST_DECODES` decodes, or as many as were asked.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from quire.contracts.errors import QuireError
from quire.contracts.step import StepSync
from quire.engine.core import EngineCore
from quire.engine.plan_writer import InFlight
from quire.engine.replicas import Core, Replicas
from quire.observe.calls import CallRecorder, Shown, Span, Stop, fold, methods_of
from quire.procs.in_process import InProcessExecutor
from quire.procs.live_feed import living
from quire.procs.messages import Add, Control, FromCore, Outputs, Reply

LOG = logging.getLogger("quire")
TRACE = "trace_request"  # name of the `Control`
PATIENCE = 60.0  # seconds for a request to come
MOST_STEPS = 8  # in which the request takes part
MOST_DECODES = 2  # of the request
MOST_OTHERS = 64  # steps of its replica without the request after its first one, such as while it is preempted
OF_STEPS = ("step", "confirm")  # functions of a core that belong to a step; others are about other requests
EXECUTOR = ("submit", "release", "collect")  # functions of an executor that steps call
NOBODY, BUSY, REPLACED = "no_request", "trace_runs", "trace_replaced"  # why there is no trace
ENDED = "request_ended"  # the same, of a request that was named


class TracedStep(msgspec.Struct, kw_only=True):
    """A step in which the request took part.

    kind      of the request's part: "prefill" or "decode"
    first, count   its tokens in the step: the position of the first one, and their number
    requests, tokens   all requests and tokens of the step
    calls     in the core; then a call for each model runner, with the calls in it
    """

    step: int
    kind: str
    first: int
    count: int
    requests: int
    tokens: int
    calls: list[Span] = []


class TracedRequest(msgspec.Struct, kw_only=True):
    """The trace of a request. calls: in the core before its first step, of a request that was traced from its arrival.
    ended: the request ended with the last step."""

    request_id: str
    num_prompt: int
    calls: list[Span]
    steps: list[TracedStep]
    ended: bool


class RequestTrace:
    """Traces one request of a core for a front end that asks. One thread calls it.

    active  True: a front end waits for a trace
    """

    def __init__(
        self, core: Core, send: Callable[[FromCore], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._send, self._clock = core, send, clock
        self.active = False
        self._asked, self._tenant, self._until = 0, "", 0.0
        self._decodes, self._folded = MOST_DECODES, True
        self._recording: _Recording | None = None

    def ask(self, message: Control, *, busy: bool = False) -> None:
        """Trace the next request of `tenant`, and reply when it is traced. Arguments of the message:

        on        False: who asked for that has left
        record    of a live request as in `/debug/requests`: trace it, not the next one
        decodes   the last decode of the request to trace (default: `MOST_DECODES`)
        folded    False: with the calls inside those that are `alike`
        busy      True: a profile of the core's calls runs
        """
        tenant: str = message.args["tenant"]
        if not message.args["on"]:
            if self.active and tenant == self._tenant:
                self._end()
            self._send(Reply(message.id, True))
            return
        if self._recording is not None or busy:
            self._send(Reply(message.id, _refused(BUSY)))
            return
        if self.active:
            self._reply(_refused(REPLACED))
        self.active, self._asked, self._tenant = True, message.id, tenant
        self._until = self._clock() + PATIENCE
        self._decodes, self._folded = message.args.get("decodes", MOST_DECODES), message.args.get("folded", True)
        if (record := message.args.get("record")) is None:
            return
        handle = next((one for one in record["handles"] if one in self._core.handles), None)
        if handle is None:
            self._reply(_refused(ENDED))
            return
        self._record(handle, record["request_id"], record["num_prompt"], arrives=False)

    def begin(self, message: Add) -> None:
        """Begin to record, if a front end waits for this request. Call this before the core takes the request."""
        new = message.requests[0]
        if self._recording is None and new.account.tenant == self._tenant:
            self._record(new.handle, new.request_id, len(new.token_ids) // 4, arrives=True)

    def _record(self, handle: int, request_id: str, num_prompt: int, *, arrives: bool) -> None:
        self._drain()
        found = TracedRequest(request_id=request_id, num_prompt=num_prompt, calls=[], steps=[], ended=False)
        self._recording = _Recording(
            self._core, handle, found, decodes=self._decodes, folded=self._folded, arrives=arrives
        )

    def tell(self) -> None:
        """Take the calls of the last step, and reply if it was the last one of the trace."""
        recording = self._recording
        if recording is None:
            if self._clock() >= self._until:
                self._reply(_refused(NOBODY))
            return
        if recording.on:
            self._drain()
        if recording.step():
            self._end()

    def _drain(self) -> None:
        """End the steps in flight, so that the times of two steps are apart. Replicas go on: they have no such call."""
        while isinstance(self._core, EngineCore) and self._core.in_flight:
            self._send(Outputs(self._core.confirm()))

    def _end(self) -> None:
        """Reply with the trace as far as it goes, or with words if no request has come."""
        recording, self._recording = self._recording, None
        if recording is None:
            self._reply(_refused(REPLACED))
            return
        try:
            self._reply(msgspec.json.encode(recording.end()).decode())
        except Exception as error:  # the caller is told; the engine goes on
            if not isinstance(error, QuireError):
                LOG.error("the trace of a request failed", exc_info=error)
            self._reply(error=f"there is no trace: {error}")

    def _reply(self, value: str | None = None, error: str | None = None) -> None:
        self.active = False
        self._send(Reply(self._asked, value, error))


class _Recording:
    """The recorded calls of a core, from the arrival of a request on.

    found     the trace, which grows with each step
    decodes   of the request to record
    folded    without the calls inside those that are `alike`
    arrives   the first call is the arrival of the request
    on        True: the model runners of the request's replica record, too
    """

    def __init__(
        self, core: Core, handle: int, found: TracedRequest, *, decodes: int, folded: bool, arrives: bool
    ) -> None:
        self._core, self._handle, self._found = core, handle, found
        self._decodes, self._folded, self._arrives = decodes, folded, arrives
        self._owner: EngineCore | None = None  # the replica that has the request, once the request takes part in a step
        self._number, self._skipped = 0, 0  # the replica's number, and its results that were due when `on` began
        self._traced: list[EngineCore] = []  # replicas whose runners record
        self._ran: list[TracedStep | None] = []  # steps of the owner since then; None: without the request
        self._part: TracedStep | None = None  # of the step that was submitted last
        self._recorder = CallRecorder(core_stops(core)).__enter__()
        for number, one in living(core):
            self._recorder.put(one, "begin_step", self._begin_step_of(number, one, one.begin_step))
            self._recorder.put(one, "submit", self._submit_of(one, one.submit))

    @property
    def on(self) -> bool:
        return self._owner is not None

    def step(self) -> bool:
        """Keep the calls since the last step if the request took part in it. Return True after the last step."""
        calls, found, part = self._recorder.root.inside[:], self._found, self._part
        self._recorder.root.inside.clear()
        self._part = None
        if self._arrives and not found.calls:
            found.calls = calls[:1]
        if part is not None:
            part.calls += [call for call in calls if call.name.rpartition(".")[2] in OF_STEPS]
            found.steps.append(part)
        found.ended = self._handle not in self._core.handles
        if self._owner is not None and self._owner.needs_masks:
            return False  # a runner has a step that cannot end
        decodes = sum(one.kind == "decode" for one in found.steps)
        most = MOST_STEPS + self._decodes - MOST_DECODES
        enough = len(found.steps) >= most or decodes >= self._decodes or self._ran.count(None) > MOST_OTHERS
        return found.ended or enough

    def end(self) -> TracedRequest:
        """Put everything back. Return the trace."""
        try:
            return self._whole()
        finally:
            self._recorder.__exit__(None, None, None)

    def _whole(self) -> TracedRequest:
        told = [(one, one.executor.control("trace", {"on": False, "folded": self._folded})) for one in self._traced]
        shown: Shown = set()
        found = self._found
        for calls in (found.calls, *(step.calls for step in found.steps)) if self._folded else ():
            calls[:] = [fold(call, shown) for call in calls]
        own = next((calls for one, calls in told if one is self._owner), [])
        ranks = msgspec.convert(own, list[list[Span]])
        for rank, calls in enumerate(ranks):
            for part, spans in zip(self._ran, by_step(calls, self._skipped), strict=False):
                if part is not None and spans:
                    part.calls.append(self._runner(rank, len(ranks), spans))
        return found

    def _runner(self, rank: int, ranks: int, calls: list[Span]) -> Span:
        name = f"rank {rank}" if ranks > 1 else "model runner"
        if isinstance(self._core, Replicas):
            name += f" of replica {self._number}"
        where = "a process of its own" if ranks > 1 else "the process of the core"
        return Span(name, where, begin=calls[0].begin, end=calls[-1].end, inside=calls)

    def _begin_step_of(
        self, number: int, core: EngineCore, begin_step: Callable[[], InFlight | None]
    ) -> Callable[[], InFlight | None]:
        def begun() -> InFlight | None:
            planned = begin_step()
            if (part := self._part_of(core, planned)) is not None:
                self._part = part
                if self._owner is None:
                    self._begin_runners(number, core)
            return planned

        return begun

    def _submit_of(self, core: EngineCore, submit: Callable[..., None]) -> Callable[..., None]:
        def submitted(planned: InFlight | None, sync: StepSync | None = None) -> None:
            if core is self._owner:
                self._ran.append(None if planned is None else self._part)
            submit(planned, sync)

        return submitted

    def _begin_runners(self, number: int, core: EngineCore) -> None:
        """Let the model runners record. Replicas in lock-step do so together, since none may run eagerly alone."""
        began = time.perf_counter_ns()
        self._owner, self._number, self._skipped = core, number, len(core.in_flight)
        every = self._core
        self._traced = every.live if isinstance(every, Replicas) and every.lockstep else [core]
        for one in self._traced:
            one.executor.control("trace", {"on": True})
        outer = self._recorder.root.inside[-1]
        outer.inside.append(Span("the trace begins in the model runner", "", begin=began, end=time.perf_counter_ns()))

    def _part_of(self, core: EngineCore, planned: InFlight | None) -> TracedStep | None:
        """Return the request's part in a step of a replica; None: it has none."""
        if planned is None or self._handle not in core.handles:
            return None
        plan, table = planned.plan, core.scheduler.table
        (places,) = np.nonzero(table.handle[plan.slots] == self._handle)
        if not len(places):
            return None
        place = int(places[0])
        count = int(plan.num_tokens[place])
        return TracedStep(
            step=plan.step,
            kind="decode" if place < plan.num_decodes else "prefill",
            first=int(table.planned[plan.slots[place]]) - count,
            count=count,
            requests=len(plan.slots),
            tokens=int(plan.num_tokens.sum()),
        )


def core_stops(core: Core) -> Iterator[Stop]:
    """Yield (owner, attribute, name) of the functions of a core that a step calls, down to its executor's."""
    cores = core.cores if isinstance(core, Replicas) else (core,)
    parts: list[Any] = [core] if isinstance(core, Replicas) else []
    for one in cores:
        parts += [one, one.scheduler, one.scheduler.allocator, one._finisher]
    yield from (stop for stop in methods_of((type(part).__name__, part) for part in parts) if stop[1] != "control")
    for one in cores:
        executor = one.executor
        works = executor._runner if isinstance(executor, InProcessExecutor) else executor
        of_executor = methods_of([(type(executor).__name__, works)])
        yield from (stop for stop in of_executor if stop[1] in EXECUTOR)


def by_step(calls: list[Span], skipped: int) -> list[list[Span]]:
    """Return the calls of a model runner by step: a submit, and the release and the collect that belong to it.

    skipped   steps that were submitted before the recording, and collected in it
    """
    steps, num_collects = list[list[Span]](), -skipped
    for call in calls:
        kind = call.name.rpartition(".")[2]
        if kind == "submit":
            steps.append([call])
        elif kind == "release" and steps:
            steps[-1].append(call)
        elif kind == "collect":
            if 0 <= num_collects < len(steps):
                steps[num_collects].append(call)
            num_collects += 1
    return steps


def _refused(why: str) -> str:
    return msgspec.json.encode({"refused": why}).decode()

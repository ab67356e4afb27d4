"""Trace of a streamed chat request through a server: `quire trace --from http`.

This process becomes the HTTP process of a server on a free port: the same application, on real sockets, with the
engine core and its ranks in processes of their own. A thread of it is the client. Functions of the HTTP process are
recorded here, those of the core and of the ranks by the trace of a request (`procs/request_trace.py`). All processes
of a machine have one clock. Never imports torch.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec

from quire.config.serve import ServerConfig
from quire.contracts.text_table import read_rows
from quire.entry.cli.remote import CHAT, COMPLETIONS, RemoteServer
from quire.entry.http.access.auth import Guard
from quire.entry.http.app import build_app
from quire.entry.http.engine import ServedEngine
from quire.entry.http.listener import HttpListener
from quire.entry.http.server import BEFORE_ROUTES
from quire.entry.http.sockets import listen, release, url_of
from quire.observe.calls import CallRecorder, Shown, Span, Stop, fold
from quire.observe.metrics import Metrics
from quire.observe.render_calls import CLIENT, CORE, HTTP, TRACKS
from quire.procs.core_client import Launch
from quire.procs.messages import Control
from quire.procs.request_trace import OF_STEPS, TRACE, TracedRequest
from quire.traces.decisions import decisions_of, with_decisions
from quire.traces.live_trace import phase_of

STOPS = Path(__file__).with_name("http_stops.txt")
SEND = "CoreClient.send"


def trace_http(
    config: ServerConfig,
    prompt: str,
    *,
    max_tokens: int,
    full: bool = False,
    launch: Launch | None = None,
    **sampling: Any,
) -> Span:
    """Start a server, send one streamed request, and return its calls in every process, in the order of time.

    full       with the calls inside those that are alike
    launch     function that starts the core (default: in its own process)
    sampling   other sampling parameters, as fields of the request
    """
    listener = listen(config.http)
    try:
        asked = {"max_tokens": max_tokens, "ignore_eos": True, **sampling}
        return asyncio.run(_served(config, listener, prompt, asked, full, launch))
    finally:
        release(listener, config.http)


def http_stops() -> Iterator[Stop]:
    """Yield (owner, attribute, name) of every function of an HTTP process to record, for `CallRecorder`."""
    for path, kind, names in read_rows(STOPS):
        module = import_module(f"quire.{path}")
        for name in names.split():
            if kind != "-":
                yield getattr(module, kind), name, f"{kind}.{name}"
                continue
            function = getattr(module, name)
            for other in [one for key, one in sys.modules.items() if key.startswith("quire.")]:
                if vars(other).get(name) is function:
                    yield other, name, f"{path.rpartition('.')[2]}.{name}"


async def _served(
    config: ServerConfig,
    listener: socket.socket,
    prompt: str,
    asked: dict[str, Any],
    full: bool,
    launch: Launch | None,
) -> Span:
    metrics = Metrics(config.serve.metrics_prefix, config.model_names[0])
    engine = ServedEngine(config, metrics=metrics, launch=launch)
    refused = partial(metrics.http, BEFORE_ROUTES, method="any")
    http = HttpListener(build_app(engine, config, metrics), config.http, listener, refused)
    http.start()
    try:
        ready = await engine.start(lambda loading: None)
        chat = engine.text is not None and engine.text.chat_template is not None
        given = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = {**given, **asked, "stream": True}
        client = _Client(url_of(listener, config.http), CHAT if chat else COMPLETIONS, body)
        await asyncio.to_thread(client.ask)  # warms up
        await engine.control("reset_prefix_cache")
        traces = engine.control(TRACE, on=True, tenant="", decodes=asked["max_tokens"], folded=not full)
        asking = asyncio.create_task(traces)
        await asyncio.sleep(0)  # the core is asked
        with CallRecorder(http_stops(), told=_tell, began=_began, line=_line) as recorder:
            seen = await asyncio.to_thread(client.ask)
        traced = msgspec.json.decode(str(await asking), type=TracedRequest)
        plan = msgspec.json.decode(str(await engine.control("plan"))) or {}
        shown: Shown = set()
        calls = [call if full else fold(call, shown) for call in recorder.root.inside if call.gives != "Reply"]
        root = joined(calls, seen, traced)
        root.name = (
            f"{config.model_names[0]}, {ready.dtype} on {ready.device}; POST {client.path} of {prompt!r}; "
            "one clock for all processes"
        )
        return with_decisions(root, decisions_of(plan, engine.config, engine.text))
    finally:
        await engine.close()
        await http.stop(1.0)


class _Client:
    """A client of the server, in a thread of its process."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self._server, self.path, self._body = RemoteServer(url, None), path, body

    def ask(self) -> list[Span]:
        """Send the request and read its events. Return the request and each event as calls."""
        began = time.perf_counter_ns()
        asked = Span(f"POST {self.path}", "", f"{len(json.dumps(self._body))} bytes", begin=began, end=began)
        seen = [asked]
        with self._server.asked("POST", self.path, self._body) as response:
            for line in response:
                if line.startswith(b"data: "):
                    now = time.perf_counter_ns()
                    seen.append(Span("reads an event", "", gives=f"{len(line)} bytes", begin=now, end=now))
        return seen


def joined(calls: list[Span], seen: list[Span], traced: TracedRequest) -> Span:
    """Return one tree of the calls of all processes, by time: a call for each stay in a process, with the calls in it.

    calls    of the HTTP process; what a coroutine calls after the request left for the core follows later in the tree
    seen     of the client
    traced   of the core and of the model runners
    """
    sent = max(one.end for call in calls for one in _within(call) if one.name == SEND)
    parts = [(one.begin, CLIENT, "", one) for one in seen]
    for call in calls:
        late = list(_taken_after(call, sent))
        parts += [(one.begin, HTTP, "", one) for one in ([call] if call not in late else []) + late]
    parts += [(one.begin, CORE, "", one) for one in traced.calls]
    for number, step in enumerate(traced.steps):
        parts += [(step.calls[0].begin, CORE, phase_of(step, number), one) for one in step.calls]
    parts += [(one.end - 1, one.name, "", one) for one in _wires(sent, calls, traced)]
    parts.sort(key=lambda part: part[0])
    root = Span("", "", begin=seen[0].begin, end=max(one.end for *_, one in parts))
    for (process, phase), stay in groupby(parts, key=lambda part: part[1:3]):
        inside = [one for *_, one in stay]
        if process in TRACKS:
            where = "a process of its own" if process == CORE else "this process"
            end = max(one.end for one in inside)
            root.inside.append(Span(process, where, phase=phase, begin=inside[0].begin, end=end, inside=inside))
        else:
            root.inside += inside
    for span, after in pairwise(root.inside):
        if span.name == HTTP:  # a coroutine goes on after this stay
            last = after.begin if after.name in TRACKS else after.end
            ends = [one.end for call in span.inside for one in _within(call)]
            span.end = max((end for end in ends if end <= last), default=last)  # all of its calls may go on
    return root


def _wires(sent: int, calls: list[Span], traced: TracedRequest) -> Iterator[Span]:
    """Yield the ways of messages between the processes, from the end of the sender's call to the receiver's begin."""
    told = "msgpack over a ZeroMQ socket"
    for call in traced.calls[:1]:  # it may begin before the sender's function returns
        yield Span("wire to the core", "procs/wire.py", told, begin=min(sent, call.begin), end=call.begin)
    left = [max(call.end for call in step.calls if _is_core(call)) for step in traced.steps]
    heard = [one for call in calls for one in _within(call) if one.name == "Messages.decode"]
    for one in sorted(heard, key=lambda one: one.begin):
        if left and one.gives == "Outputs" and left[0] <= one.begin:
            yield Span("wire from the core", "procs/wire.py", told, begin=left.pop(0), end=one.begin)


def _is_core(call: Span) -> bool:
    """True for a step's call in the core; False for the call that holds those of a model runner."""
    return call.name.rpartition(".")[2] in OF_STEPS


def _within(span: Span) -> Iterator[Span]:
    yield span
    for inner in span.inside:
        yield from _within(inner)


def _taken_after(span: Span, time: int) -> Iterator[Span]:
    """Take the calls that begin after `time` out of the tree of a call, and yield them."""
    if span.begin >= time:
        yield span
        return
    for inner in span.inside:
        yield from _taken_after(inner, time)
    span.inside = [inner for inner in span.inside if inner.begin < time]


def _began(open_ones: list[Span], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add sizes of texts and bytes to the shapes, and the refusal of a guard. Of other messages nothing is told."""
    span = open_ones[-1]
    if args and isinstance(args[0], Guard):
        refusal = args[0].refusal
        span.takes = getattr(refusal, "__name__", type(refusal).__name__)
        return
    sizes = [size for one in (*args, *kwargs.values()) if (size := _size(one))]
    span.takes = ", ".join([span.takes, *sizes] if span.takes else sizes)


def _tell(result: Any, open_ones: list[Span]) -> None:
    if size := _size(result):
        open_ones[-1].inside[-1].gives = size


def _size(value: object) -> str:
    """Return the kind and size of a text, of bytes or of a message; "" for other values."""
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return f"{len(value)} characters"
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return f"{len(value)} message{'s' * (len(value) > 1)}"
    is_message = isinstance(value, msgspec.Struct) and type(value).__module__.endswith(".messages")
    return type(value).__name__ if is_message and not isinstance(value, Control) else ""


def _line() -> object:
    """Return the task that runs, or the thread outside of tasks."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()

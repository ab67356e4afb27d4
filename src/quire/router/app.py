"""The router as an ASGI application, and the one for its operators.

    passed on        the paths of ROUTES
    /debug/live      the live view of all backends; other paths of the live view: of one (`live.py`)
    /live            200 while the router runs            /metrics   Prometheus
    /health          200 while a backend takes requests   /ready     likewise, and until the router ends

    operators, on a loopback port of their own:
    GET  /backends           the list, with health and requests in flight
    POST /backends/drain     {"backend": URL}: no new requests go there     POST /backends/resume   takes that back

Stored responses are state of one backend: `stored.py` finds it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from quire.config.serve import TracingConfig
from quire.contracts.caller import CallerRefused
from quire.contracts.errors import RequestError, shown
from quire.observe.tracing import open_tracer
from quire.router.asked import RESPONSES, Asked, Send, WholeAnswer, asked_for, refusal, state_of
from quire.router.breaker import Circuit
from quire.router.discovery import DnsSource, FileSource, Source, SourceWatch
from quire.router.exchange import Forwarder
from quire.router.fleet import Fleet
from quire.router.gate import CallerGate, OpenGate
from quire.router.live import LIVE, LiveStreams, ask_one, is_live
from quire.router.metrics import RouterMetrics
from quire.router.policy import Chooser
from quire.router.prompts import RoutedBody
from quire.router.settings import RouterConfig
from quire.router.spans import TracedRoutes
from quire.router.state import RouterState
from quire.router.stored import is_read, methods

LOG = logging.getLogger("quire")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
NO_TRACING = TracingConfig()
POSTED = (
    f"/v1/completions /v1/chat/completions {RESPONSES} /v1/messages /v1/messages/count_tokens /v1/embeddings "
    "/v1/rerank /v2/rerank /rerank /v1/score /score /tokenize /detokenize"
).split()
ROUTES = dict.fromkeys(POSTED, "POST") | dict.fromkeys(("/v1/models", "/tokenizer_info", "/version"), "GET")
MODEL = "/v1/models/"
DRAIN, RESUME = "/backends/drain", "/backends/resume"


class RouterApp:
    """A router: an ASGI application. `start` checks the backends first; `drain`, `idle` and `close` end it.

    num_live        requests that are being answered
    backends, own   all backends of now, and those that answer requests; both change
    watches         sources of backends that are looked at again and again
    gate            limits of callers
    traced          the application with a span for each request, if there is a collector; else the router itself
    """

    def __init__(self, config: RouterConfig, *, web: bool = True, tracing: TracingConfig = NO_TRACING) -> None:
        """web: pass the live view on, too. Raises `ConfigError`."""
        self._config, self._fleet = config, Fleet(config, RouterState(config.state_file))
        self.backends, self.own, discovery = self._fleet.backends, self._fleet.own, config.discovery
        seconds, timeout = discovery.discovery_interval, config.faults.connect_timeout
        files = [] if discovery.backend_file is None else [FileSource(discovery.backend_file, seconds)]
        names = [DnsSource(one, seconds, timeout) for one in discovery.backend_dns]
        sources: list[Source] = [*files, *names]
        self.watches = [SourceWatch(source, self._fleet) for source in sources]
        self.metrics = RouterMetrics(self.backends, self._counts)
        self._chooser = Chooser(config, self.backends)
        self._forwarder = Forwarder(config, self.own, self._fleet.prefills, self._chooser, self.metrics)
        self._live, self._web = LiveStreams(self.backends, config.faults.first_byte_timeout), web
        self.gate: CallerGate = OpenGate()
        self._fleet.fell, self._fleet.changed = self._chooser.fell, self._changed
        self._tasks: list[asyncio.Task[None]] = []
        self._tracer = open_tracer(tracing, self.metrics.trace_spans, "quire-router")
        self.traced = self if self._tracer is None else TracedRoutes(self, self._tracer)
        self.num_live = 0
        self._draining = False

    def refused(self, status: int) -> None:
        """Count a request that was refused, here or by the server in front."""
        self.metrics.count("refusals", str(status))

    async def start(self) -> None:
        """Find the backends and check each once, and from now on again and again. Raises `ConfigError`."""
        for one in self.watches:
            await one.first()
        await self._fleet.start()
        seconds = self._config.discovery.discovery_interval
        self._tasks = [asyncio.create_task(one.run(seconds)) for one in self.watches]

    def _changed(self) -> None:
        self.metrics.forget_gone()
        self._live.tell()

    def _counts(self) -> dict[str, Any]:
        """Return the counts that others keep, for the metrics."""
        return {
            "retries_denied": self._forwarder.budget.denied,
            "overflows": self._chooser.overflows,
            "discovery_failures": {one.source.name: one.failures for one in self.watches},
        }

    def drain(self) -> None:
        """Refuse new requests; those that are being answered go on. The live view goes on until none is left."""
        self._draining = True
        self._live.drain(self._num_left)

    async def idle(self) -> None:
        """Wait until no request is being answered, after `drain`."""
        while self.num_live:
            self._live.drain(self._num_left)
            if not self._num_left:
                self._live.end()
            await asyncio.sleep(0.02)

    @property
    def _num_left(self) -> int:
        return self.num_live - self._live.num_readers

    async def close(self) -> None:
        """End the checks and the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.close()
        if self._tracer is not None:
            self._tracer.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        assert scope["type"] == "http", "the server in front gives HTTP requests only"
        own = self._own_answer(scope)
        if own is not None:
            if own.status >= 400:
                self.refused(own.status)
            await own.send(send)
            return
        self.num_live += 1
        try:
            await self._pass(scope, receive, send)
        except ConnectionAbortedError:
            raise  # a client left early, or an answer broke off: the server in front closes the connection
        except Exception:
            LOG.exception("internal error of the router")
            raise
        finally:
            self.num_live -= 1

    async def operate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of an operator."""
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/backends"):
            await self._fleet.look()
            answer = _json({"backends": [backend.described() for backend in self.backends]})
        elif method == "POST" and path in (DRAIN, RESUME):
            answer = await self._set_draining(scope, await _read(receive), path == DRAIN)
        else:
            words = f"there is no {method} {shown(path)}: use GET /backends, POST {DRAIN} or POST {RESUME}."
            answer = _refusal(scope, 404, words, "unknown_path")
        await answer.send(send)

    async def _set_draining(self, scope: Scope, body: bytes, draining: bool) -> WholeAnswer:
        try:
            name = msgspec.json.decode(body, type=dict[str, str]).get("backend", "")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refusal(scope, 400, f'{error}: send {{"backend": "http://host:8000"}}.', "invalid_value")
        backend = next((backend for backend in self.backends if backend.name == name.rstrip("/")), None)
        if backend is None:
            return _refusal(scope, 404, f"{shown(name)} is no backend: GET /backends lists them.", "unknown_backend")
        if not draining:
            await self._fleet.look(backend)
        forgotten = self._fleet.set_draining(backend, draining)
        return _json(backend.described() | ({"not_kept": forgotten} if forgotten else {}))

    def _own_answer(self, scope: Scope) -> WholeAnswer | None:
        """Return the answer to what is not passed on; None for what is."""
        method, path = scope["method"], scope["path"]
        if path in ("/health", "/live", "/ready") and method == "GET":
            able = [backend for backend in self.own if backend.usable]
            ends = self._draining and path == "/ready"
            if path != "/live" and (ends or not able):
                return _refusal(scope, 503, "the router ends." if ends else "no backend takes requests.", "not_ready")
            circuits = sum(backend.breaker.state is not Circuit.CLOSED for backend in self.own)
            told = {"backends": len(self.own), "usable": len(able), "open_circuits": circuits}
            return _json({"status": "draining" if self._draining else "ok", **told})
        if path == "/metrics" and method == "GET":
            text, kind = self.metrics.render()
            return WholeAnswer(status=200, headers=[(b"content-type", kind.encode())], body=text)
        if is_live(path) and not self._web:
            words = "this router was started with --no-web: ask a backend itself."
            return _refusal(scope, 404, words, "web_off")
        named = is_live(path) or path.startswith(MODEL)
        one = "GET" if named and "/.." not in path else ROUTES.get(path)
        wanted = methods(path) if one is None else (one,)
        if not wanted:
            words = f"this router passes on no path {shown(path)}: ask a backend itself."
            return _refusal(scope, 404, words, "unknown_path")
        if method not in wanted:
            words = f"{shown(path)} does not accept the method {shown(method)}: use {' or '.join(wanted)}."
            return _refusal(scope, 405, words, "method_not_allowed")
        if self._draining:
            words = "this router ends and takes no new requests: try again in a moment."
            return _refusal(scope, 503, words, "router_ending")
        return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = RoutedBody(await _read(receive))
        except RequestError as error:
            self.refused(400)
            return await _refusal(scope, 400, str(error), "invalid_value").send(send)
        asked, model, tokens = asked_for(scope, body), body.model, body.num_tokens
        del body  # `asked` lets it go when the answer begins
        answering = asyncio.current_task()
        assert answering is not None
        finished = False

        async def leave_with_client() -> None:
            await receive()  # after the body, the only message is that the client has gone
            if not finished:
                self.metrics.disconnects += 1
                answering.cancel()

        watching = asyncio.create_task(leave_with_client())
        try:
            gate = OpenGate() if is_read(asked) else self.gate  # a cancellation names no model
            with gate.hold(scope, model, tokens) as spent:
                if spent is not None:
                    asked.direct, send = spent.direct(asked.direct), spent.sending(send)
                await self._answer(asked, send)
        except CallerRefused as refused:
            self.refused(refused.status)
            await _refused(asked, refused).send(send)
        except asyncio.CancelledError:
            if not watching.done():
                raise
            answering.uncancel()  # the client has gone, and the connection to the backend is closed
        finally:
            finished = True
            watching.cancel()

    async def _answer(self, asked: Asked, send: Send) -> None:
        if asked.path == LIVE:
            await self._live.answer(asked, send)
        elif is_live(asked.path):
            await (await ask_one(self.backends, asked, self._config.faults.first_byte_timeout)).send(send)
        else:
            await self._forwarder.forward(asked, send)


def _refusal(scope: Scope, status: int, message: str, code: str) -> WholeAnswer:
    state = state_of(scope)
    state["facts"]["error"] = code
    return refusal(status, message, code, scope["path"], state["request_id"])


def _refused(asked: Asked, error: CallerRefused) -> WholeAnswer:
    asked.failed(error.code)
    return refusal(error.status, str(error), error.code, asked.path, asked.request_id, error.retry_after)


async def _read(receive: Receive) -> bytes:
    """Return the body of a request. Raises `ConnectionAbortedError` if it does not come whole."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _json(content: object) -> WholeAnswer:
    return WholeAnswer(status=200, headers=[(b"content-type", b"application/json")], body=msgspec.json.encode(content))

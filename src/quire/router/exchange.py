"""A request on its way: the choice of a backend, further tries before the first byte, and the answer as it comes.

    look at the prompt -> choose -> send -> first byte --> piece by piece --> end
                            ^                  |                  |
                            +-- nothing came --+                  +-- broke off: the client is told, nobody tries again

Nothing of an answer, its head included, goes to the client before the first byte of its body. A client that leaves
closes the connection to the backend.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.contracts.error_bodies import MESSAGES_PATHS, messages_body, openai_body
from quire.observe.tracing import ServerSpan, own
from quire.router.backends import Backend, Load
from quire.router.metrics import RouterMetrics
from quire.router.policy import Chooser, Sight
from quire.router.prompts import RoutedBody
from quire.router.settings import RouterConfig
from quire.router.split import SPLIT_PATHS, prefilled
from quire.router.upstream import HOP_BY_HOP, LEFT_OUT, Header, Upstream, UpstreamError, read_all

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
DIRECT_BODY = "direct-body"  # ASGI extension of `entry/http/protocol.py`: a body that is written without waiting
ELSEWHERE = (429, 503)  # statuses of a backend that is full, loading or ending: another one may take the request
OWN_HEADERS = HOP_BY_HOP | {b"host", b"content-length"}
SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
FAILED = "backend_failed"
EMPTY = RoutedBody(b"")
ENDS = (b"\n\n", b"\r\n\r\n")  # of an event


@dataclass(frozen=True, kw_only=True)
class WholeAnswer:
    """A whole answer, which the router has in its memory."""

    status: int
    headers: Sequence[Header]
    body: bytes

    async def send(self, send: Send) -> None:
        """Send it to the client."""
        headers = [header for header in self.headers if header[0] not in OWN_HEADERS | LEFT_OUT]
        headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@dataclass(kw_only=True)
class Asked:
    """A request as it goes to backends. `data`: the body to send; it and `body` are let go when an answer begins.
    `span`: None without tracing."""

    method: bytes
    path: str
    request_id: str
    target: bytes
    headers: list[Header]
    body: RoutedBody
    data: bytes
    direct: Any = None
    span: ServerSpan | None = None

    def note(self, **facts: str | int) -> None:
        """Note facts for the span, if there is one."""
        if self.span is not None:
            self.span.notes |= own(**facts)

    @contextmanager
    def calling(self, name: str) -> Iterator[list[Header]]:
        """Context manager: another request to a backend for this one. Its headers, with a span of its own below."""
        if self.span is None:
            yield self.headers
            return
        with self.span.below(name, calls=True) as span:
            yield span.headers(self.headers)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A backend did not begin an answer. `reason`: a word for the metrics; `answer`: what it said, if anything."""

    reason: str
    message: str
    answer: WholeAnswer | None = None


def refusal(status: int, message: str, code: str, path: str, request_id: str) -> WholeAnswer:
    """Return an error as an answer of the router itself, in the format of the path's API."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return WholeAnswer(status=status, headers=headers, body=_error_body(status, message, code, path, request_id))


def _error_body(status: int, message: str, code: str, path: str, request_id: str) -> bytes:
    if MESSAGES_PATHS.search(path):
        return messages_body(status, message, request_id)
    return openai_body(message, "invalid_request_error" if status < 500 else "server_error", code)


def request_id_of(headers: Iterable[Header]) -> str:
    """Return the X-Request-Id of a client as a text for headers; a new one if the client has sent none."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if SANE_ID.fullmatch(given) else uuid.uuid4().hex


def asked_for(scope: MutableMapping[str, Any], body: RoutedBody) -> Asked:
    """Return a request as backends get it. It keeps the client's headers, API keys too, and has a request id."""
    headers = [header for header in scope["headers"] if header[0] not in OWN_HEADERS]
    request_id = request_id_of(headers)
    if not any(name == b"x-request-id" for name, _ in headers):
        headers.append((b"x-request-id", request_id.encode()))
    query = scope.get("query_string", b"")
    span: ServerSpan | None = scope.get("state", {}).get("span")
    if span is not None:
        span.rename(f"POST {scope['path']}")
        span.notes |= {"http.route": scope["path"], "gen_ai.request.id": request_id}
    return Asked(
        method=scope["method"].encode(),
        path=scope["path"],
        request_id=request_id,
        headers=headers if span is None else span.headers(headers),
        body=body,
        data=body.data,
        target=scope["raw_path"] + (b"?" + query if query else b""),
        direct=scope.get("extensions", {}).get(DIRECT_BODY),
        span=span,
    )


class Forwarder:
    """Passes requests on to `backends`, and prompts to `prefills` first where that pays."""

    def __init__(
        self,
        config: RouterConfig,
        backends: Sequence[Backend],
        prefills: Sequence[Backend],
        chooser: Chooser,
        metrics: RouterMetrics,
    ) -> None:
        self._config, self._backends, self._prefills = config, backends, prefills
        self._chooser, self._metrics = chooser, metrics

    async def forward(self, asked: Asked, send: Send) -> None:
        """Answer a request."""
        began = time.perf_counter()
        tried: list[Backend] = []
        fault: Fault | None = None
        answer: WholeAnswer | None = None  # of the last backend that refused
        able = self._able(tried)
        idlest = min(able, key=lambda backend: backend.in_flight, default=None)
        sight = await self._chooser.look(asked.body, asked.path, asked.headers, idlest)
        while able and len(tried) <= self._config.retries:
            backend = self._chooser.pick(sight, able)
            tried.append(backend)
            if fault is not None:
                self._metrics.count("retries", fault.reason)
            else:
                self._metrics.choice.observe(time.perf_counter() - began)
                self._metrics.prompt_tokens += sight.total
                self._metrics.prefix_hit_tokens += sight.of(backend)
            # Only the first try waits for a prefill: its blocks are promised to one backend.
            asked.data = await self._prefill(asked, sight, backend) if fault is None else asked.body.data
            self._chooser.sent(asked.body, backend)
            asked.note(backend=backend.name, tries=len(tried))
            # An answer that is no stream begins at its end: nobody sees when its prompt is computed.
            computes = asked.data is asked.body.data and asked.body.text("stream") == b"true"
            with Load(backend, sight.total, sight.of(backend) if computes else sight.total) as load:
                fault = await self._try(backend, load, asked, send)
            if fault is None:
                return
            answer, able = fault.answer or answer, self._able(tried)
        answer = answer or self._hopeless(fault, asked)
        self._metrics.count("refusals", str(answer.status))
        await answer.send(send)

    def _able(self, tried: Sequence[Backend]) -> list[Backend]:
        return [backend for backend in self._backends if backend.usable and backend not in tried]

    def _hopeless(self, fault: Fault | None, asked: Asked) -> WholeAnswer:
        if fault is None:
            state = "being drained" if any(backend.up for backend in self._backends) else "down"
            words, status, code = (
                f"no backend takes requests: all are {state}. Try again in a moment.",
                503,
                "no_backend",
            )
        else:
            words, status, code = f"no backend answered this request: {fault.message}. Send it again.", 502, FAILED
        return refusal(status, words, code, asked.path, asked.request_id)

    async def _prefill(self, asked: Asked, sight: Sight, backend: Backend) -> bytes:
        """Return the body for a backend, after another one has computed the prompt, if that pays."""
        if not self._prefills or asked.path not in SPLIT_PATHS or not asked.body.is_plain:
            return asked.body.data
        if sight.total - sight.of(backend) < self._config.prefill_threshold:
            self._metrics.count("prefills", "local")
            return asked.body.data
        able = [prefill for prefill in self._prefills if prefill.usable]
        if not able:
            self._metrics.count("prefills", "unserved")
            return asked.body.data
        chosen = self._chooser.pick(sight, able)
        self._chooser.sent(asked.body, chosen)
        with Load(chosen, sight.total, sight.of(chosen)), asked.calling("prefill") as headers:
            data = await prefilled(chosen, asked.target, headers, asked.body, self._config.first_byte_timeout)
        asked.note(prefill="failed" if data is None else chosen.name)
        self._metrics.count("prefills", "failed" if data is None else "remote")
        return asked.body.data if data is None else data

    async def _try(self, backend: Backend, load: Load, asked: Asked, send: Send) -> Fault | None:
        """Send a request to a backend and pass its answer on. Return a fault if no answer has begun."""
        connection: Upstream | None = None
        try:
            try:
                async with asyncio.timeout(self._config.first_byte_timeout):
                    connection = await backend.pool.ask(asked.method, asked.target, asked.headers, asked.data)
                    first = await connection.read()
                    if connection.status in ELSEWHERE:
                        answer = WholeAnswer(
                            status=connection.status,
                            headers=connection.headers,
                            body=first + await read_all(connection),
                        )
                        return Fault(reason=str(answer.status), message="all are full or ending", answer=answer)
            except TimeoutError:
                backend.doubted.set()
                limit = f"{self._config.first_byte_timeout:g} s"
                return Fault(reason="timeout", message=f"the answer did not begin within {limit}")
            except UpstreamError as error:
                backend.failed(error)
                return Fault(reason=error.reason, message=str(error))
            load.begun()
            asked.body, asked.data = EMPTY, b""
            self._metrics.count("requests", backend.name, str(connection.status))
            await self._pass_on(backend, connection, first, asked, send)
            return None
        finally:
            if connection is not None:
                backend.pool.give_back(connection)

    async def _pass_on(self, backend: Backend, connection: Upstream, piece: bytes, asked: Asked, send: Send) -> None:
        """Pass an answer on, from its first byte. Nothing is held back: each piece is written when it comes."""
        direct, observe, clock = asked.direct, self._metrics.piece.observe, time.perf_counter
        last = b"\n\n"

        def write(piece: bytes) -> bool:
            nonlocal last
            if not direct.ready:
                return False
            direct.write(piece)
            observe(clock() - connection.arrived)
            last = piece if len(piece) > 3 else last[-3:] + piece
            return True

        connection.sink = None if direct is None else write
        headers = [header for header in connection.headers if header[0] not in LEFT_OUT]
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        try:
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                observe(clock() - connection.arrived)
                last = piece if len(piece) > 3 else last[-3:] + piece
                piece = await connection.read()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamError as error:
            self._metrics.count("broken_answers", backend.name)
            if asked.span is not None:
                asked.span.error = FAILED
            backend.failed(error)
            kinds = dict(connection.headers)
            events = b"event-stream" in kinds.get(b"content-type", b"") and b"content-encoding" not in kinds
            if not events or not last.endswith(ENDS):
                raise ConnectionAbortedError(f"{backend.name}: {error}") from None  # the server cuts the connection
            event = _last_event(asked.path, asked.request_id, error)
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _last_event(path: str, request_id: str, error: UpstreamError) -> bytes:
    """Return the events that end a broken stream, in the form of its API."""
    words = f"the backend of this answer failed: {error}. Send the request again."
    body = _error_body(502, words, FAILED, path, request_id)
    if path in SPLIT_PATHS:  # OpenAI's completions and chats
        return b"data: " + body + b"\n\ndata: [DONE]\n\n"
    if not MESSAGES_PATHS.search(path):  # OpenAI's responses: the event has the fields of the error, too
        fields = msgspec.json.decode(body)["error"]
        body = msgspec.json.encode(fields | {"type": "error", "error": fields})
    return b"event: error\ndata: " + body + b"\n\n"

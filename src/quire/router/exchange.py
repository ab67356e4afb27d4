"""A request on its way: the choice of a backend, further tries before the first byte, and the answer as it comes.

    look at the prompt -> choose -> send -> first byte --> piece by piece --> end
                            ^                  |                  |
                            +-- nothing came --+                  +-- broke off: the client is told, nobody tries again

Nothing of an answer, its head included, goes to the client before the first byte of its body. A client that leaves
closes the connection to the backend.
"""

import time
from collections.abc import Sequence

import msgspec

from quire.contracts.error_bodies import MESSAGES_PATHS
from quire.router.asked import RESPONSES, Asked, Send, WholeAnswer, error_body, refusal
from quire.router.attempt import COSTLY, UNTOUCHED, Attempt, Fault, race
from quire.router.backends import Backend, Load
from quire.router.budget import RetryBudget
from quire.router.metrics import RouterMetrics
from quire.router.policy import Chooser, Sight
from quire.router.prompts import RoutedBody
from quire.router.settings import RouterConfig
from quire.router.split import SPLIT_PATHS, prefilled
from quire.router.stored import StoredResponses, is_read
from quire.router.upstream import LEFT_OUT, UpstreamError

FAILED = "backend_failed"
EMPTY = RoutedBody(b"")
ENDS = (b"\n\n", b"\r\n\r\n")  # of an event


class Forwarder:
    """Passes requests on to `backends`, and prompts to `prefills` first where that pays. Both lists change."""

    def __init__(
        self,
        config: RouterConfig,
        backends: Sequence[Backend],
        prefills: Sequence[Backend],
        chooser: Chooser,
        metrics: RouterMetrics,
    ) -> None:
        self._config, self._backends, self._prefills = config, backends, prefills
        self._faults, self._chooser, self._metrics = config.faults, chooser, metrics
        self.budget = RetryBudget(config.faults.retry_budget)
        self._stored = StoredResponses(backends)

    async def forward(self, asked: Asked, send: Send) -> None:
        """Answer a request."""
        began = time.perf_counter()
        self.budget.earn()
        holder = await self._stored.holder(asked, self._faults.connect_timeout)
        tried = [] if holder is None else [backend for backend in self._backends if backend is not holder]
        fault: Fault | None = None
        answer: WholeAnswer | None = None  # of the last backend that refused
        able, tries = self._able(asked, tried), 0
        idlest = min(able, key=lambda backend: backend.in_flight, default=None)
        sight = await self._chooser.look(asked.body, asked.path, asked.headers, idlest)
        while able and (fault is None or self._may_retry(asked, fault, tries)):
            backend = self._chooser.pick(sight, able)
            tried.append(backend)
            tries += 1
            if fault is not None:
                self._metrics.count("retries", fault.reason)
            else:
                self._metrics.choice.observe(time.perf_counter() - began)
                self._metrics.prompt_tokens += sight.total
                self._metrics.prefix_hit_tokens += sight.of(backend)
            # Only the first try waits for a prefill: its blocks are promised to one backend.
            asked.data = await self._prefill(asked, sight, backend) if fault is None else asked.body.data
            asked.note(backend=backend.name, tries=tries)
            attempt, fault = await self._begun(asked, sight, backend, tried)
            if attempt is not None:
                try:
                    return await self._pass_on(attempt, asked, send)
                finally:
                    attempt.close()
            answer, able = (fault.answer if fault else None) or answer, self._able(asked, tried)
        answer = answer or self._hopeless(fault, asked, holder)
        self._metrics.count("refusals", str(answer.status))
        await answer.send(send)

    def _able(self, asked: Asked, tried: Sequence[Backend]) -> list[Backend]:
        reads = is_read(asked)
        return [one for one in self._backends if (one.readable if reads else one.usable) and one not in tried]

    def _may_retry(self, asked: Asked, fault: Fault, tries: int) -> bool:
        """Return True if a further backend may get the request after a fault of the last one."""
        if tries > self._faults.retries or (asked.stores and fault.reason not in UNTOUCHED):
            return False
        return fault.reason not in COSTLY or self.budget.take()

    async def _begun(
        self, asked: Asked, sight: Sight, backend: Backend, tried: list[Backend]
    ) -> tuple[Attempt | None, Fault | None]:
        """Return a try that has begun to answer, on the backend or on one that is asked after it; or a fault."""
        one = self._attempt(asked, sight, backend)
        if not self._faults.hedge_after or not asked.streams or asked.stores:
            fault = await one.begin(asked, asked.data)
            return (one, None) if fault is None else (None, fault)
        other: Attempt | None = None

        def hedge() -> Attempt | None:
            nonlocal other
            able = self._able(asked, tried)
            if able and self.budget.take():
                tried.append(chosen := self._chooser.pick(sight, able))
                other = self._attempt(asked, sight, chosen)
            return other

        attempt, fault = await race(one, hedge, self._faults.hedge_after, asked)
        if other is not None:
            result = "failed" if attempt is None else "won" if attempt is other else "lost"
            self._metrics.count("hedges", result)
            asked.note(hedge=result, backend=(attempt or one).backend.name)
        return attempt, fault

    def _attempt(self, asked: Asked, sight: Sight, backend: Backend) -> Attempt:
        self._chooser.sent(asked.body, backend)
        # An answer that is no stream begins at its end: nobody sees when its prompt is computed.
        computes = asked.data is asked.body.data and asked.streams
        load = Load(backend, sight.total, sight.of(backend) if computes else sight.total)
        return Attempt(backend, load, self._faults.first_byte_timeout)

    def _hopeless(self, fault: Fault | None, asked: Asked, holder: Backend | None) -> WholeAnswer:
        if fault is None:
            words = f"no backend takes requests: {self._why()}. Try again in a moment."
            if holder is not None:
                words = "the backend that has stored the response takes no requests. Try again in a moment."
            waits = [backend.breaker.wait for backend in self._backends if backend.up and not backend.leaves]
            wait = min(waits, default=self._config.health.health_interval)
            asked.failed("no_backend")
            return refusal(503, words, "no_backend", asked.path, asked.request_id, wait)
        asked.failed(FAILED)
        words = f"no backend answered this request: {fault.message}. Send it again."
        if asked.stores and fault.reason not in UNTOUCHED:
            words = f"the backend of this request failed: {fault.message}. It may have stored an answer: send it again."
        return refusal(502, words, FAILED, asked.path, asked.request_id)

    def _why(self) -> str:
        """Return the reason why no backend can be asked."""
        up = [backend for backend in self._backends if backend.up]
        if not self._backends:
            return "none has been found"
        if not up:
            return "all are down"
        return "all are being drained" if all(backend.leaves for backend in up) else "those that are up fail"

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
            data = await prefilled(chosen, asked.target, headers, asked.body, self._faults.first_byte_timeout)
        asked.note(prefill="failed" if data is None else chosen.name)
        self._metrics.count("prefills", "failed" if data is None else "remote")
        return asked.body.data if data is None else data

    async def _pass_on(self, attempt: Attempt, asked: Asked, send: Send) -> None:
        """Pass an answer on, from its first byte. Nothing is held back: each piece is written when it comes."""
        connection, piece, backend = attempt.connection, attempt.first, attempt.backend
        assert connection is not None
        if asked.path == RESPONSES:
            self._stored.learn(piece, backend)
        asked.body, asked.data = EMPTY, b""
        self._metrics.count("requests", backend.name, str(connection.status))
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
            asked.failed(FAILED)
            attempt.failed(error)
            kinds = dict(connection.headers)
            events = b"event-stream" in kinds.get(b"content-type", b"") and b"content-encoding" not in kinds
            if not events or not last.endswith(ENDS):
                raise ConnectionAbortedError(f"{backend.name}: {error}") from None  # the server cuts the connection
            event = _last_event(asked.path, asked.request_id, error)
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _last_event(path: str, request_id: str, error: UpstreamError) -> bytes:
    """Return the events that end a broken stream, in the form of its API."""
    words = f"the backend of this answer failed: {error}. Send the request again."
    body = error_body(502, words, FAILED, path, request_id)
    if path in SPLIT_PATHS:  # OpenAI's completions and chats
        return b"data: " + body + b"\n\ndata: [DONE]\n\n"
    if not MESSAGES_PATHS.search(path):  # OpenAI's responses: the event has the fields of the error, too
        fields = msgspec.json.decode(body)["error"]
        body = msgspec.json.encode(fields | {"type": "error", "error": fields})
    return b"event: error\ndata: " + body + b"\n\n"

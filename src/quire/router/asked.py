"""A request as it goes to backends, and answers of the router itself. Knows nothing of backends."""

import math
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.contracts.error_bodies import MESSAGES_PATHS, messages_body, openai_body
from quire.contracts.request_ids import request_id_of
from quire.observe.tracing import ServerSpan, own
from quire.router.prompts import RoutedBody
from quire.router.upstream import HOP_BY_HOP, LEFT_OUT, Header

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
DIRECT_BODY = "direct-body"  # ASGI extension of `entry/http/protocol.py`: a body that is written without waiting
OWN_HEADERS = HOP_BY_HOP | {b"host", b"content-length"}
RESPONSES = "/v1/responses"
KINDS = {429: "rate_limit_error", 403: "permission_error"}  # status -> type of an error in OpenAI's format


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
    """A request as it goes to backends.

    data    the body to send; it and `body` are let go when an answer begins
    span    None without tracing
    facts   facts for the line of the log, by name
    """

    method: bytes
    path: str
    request_id: str
    target: bytes
    headers: list[Header]
    body: RoutedBody
    data: bytes
    direct: Any = None
    span: ServerSpan | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, **facts: str | int) -> None:
        """Note facts for the log, and for the span, if there is one."""
        self.facts |= facts
        if self.span is not None:
            self.span.notes |= own(**facts)

    def failed(self, code: str) -> None:
        """Note the code of the error with which the answer ends."""
        self.facts["error"] = code
        if self.span is not None:
            self.span.error = code

    @contextmanager
    def calling(self, name: str) -> Iterator[list[Header]]:
        """Context manager: another request to a backend for this one. Its headers, with a span of its own below."""
        if self.span is None:
            yield self.headers
            return
        with self.span.below(name, calls=True) as span:
            yield span.headers(self.headers)

    @property
    def stores(self) -> bool:
        """True when a backend keeps the answer: a second try could make a second one of it."""
        return self.path == RESPONSES and self.body.text("store") != b"false"

    @property
    def streams(self) -> bool:
        """True when the answer comes token by token."""
        return self.body.text("stream") == b"true"


def refusal(status: int, message: str, code: str, path: str, request_id: str, retry_after: float = 1.0) -> WholeAnswer:
    """Return an error as an answer of the router itself, in the format of the path's API.

    retry_after   seconds after which the client should try again; told with 429 and 503
    """
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    if status in (429, 503):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after))))
    return WholeAnswer(status=status, headers=headers, body=error_body(status, message, code, path, request_id))


def error_body(status: int, message: str, code: str, path: str, request_id: str) -> bytes:
    """Return the body of an error in the format of a path's API."""
    if MESSAGES_PATHS.search(path):
        return messages_body(status, message, request_id)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return openai_body(message, kind, code)


def state_of(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the state of a request: its `request_id`, the same for all who ask, and `facts` for the log."""
    state: dict[str, Any] = scope.setdefault("state", {})
    if "request_id" not in state:
        state["request_id"] = request_id_of(scope.get("headers", ()))
    state.setdefault("facts", {})
    return state


def asked_for(scope: MutableMapping[str, Any], body: RoutedBody) -> Asked:
    """Return a request as backends get it. It keeps the client's headers, API keys too, and has a request id."""
    headers = [header for header in scope["headers"] if header[0] not in OWN_HEADERS]
    state = state_of(scope)
    request_id = state["request_id"]
    if not any(name == b"x-request-id" for name, _ in headers):
        headers.append((b"x-request-id", request_id.encode()))
    query = scope.get("query_string", b"")
    span: ServerSpan | None = state.get("span")
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
        facts=state["facts"],
    )

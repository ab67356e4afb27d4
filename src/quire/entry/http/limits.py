"""What a request may look like before a route reads it. Sizes and times of connections are limited in `protocol.py`.

A body must say that it is JSON. Not out of love of order: a web page may send a body of any other type, or of no type,
to a server on its visitor's machine without asking, and may not send JSON.
"""

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entry.http.answers import error_answer
from quire.entry.http.auth import OPEN_PATHS

WITH_BODY = ("POST", "PUT", "PATCH")
HOUR = 3600


class JsonOnly:
    """Middleware: a request with a body is declared as `application/json`, or gets 415."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in WITH_BODY and scope["path"] not in OPEN_PATHS:
            given: bytes = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
            if given.partition(b";")[0].strip().lower() != b"application/json":
                answer = error_answer(415, f"Content-Type is {given[:80].decode('latin-1')!r}: bodies are JSON; send "
                                           "`Content-Type: application/json`.", "unsupported_media_type")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def cors(allowed_origins: Sequence[str]) -> list[Middleware]:
    """What lets pages of these origins call the server; nothing when there are none."""
    if not allowed_origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["GET", "POST"],
                       allow_headers=["*"], expose_headers=["x-request-id", "retry-after"], max_age=HOUR)]

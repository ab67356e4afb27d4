"""Answers of HTTP/1.0."""

from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Unchunked:
    """The application for one HTTP/1.0 request, which has no chunked encoding.
    A body of unknown length is sent as it is, and ends with the connection."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle, unknown = self._cycle, False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unknown:
                    cycle.chunked_encoding = False
            elif unknown:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, sending)

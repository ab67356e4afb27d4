"""The span of a request in the router, below the caller's and above those of the backends.

Exists only with --otlp-traces-endpoint. `exchange.py` adds what it decides: the backend, the tries, the prefill.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from quire.observe.tracing import Answering, Tracer

Application = Callable[..., Awaitable[None]]


class TracedRoutes:
    """A router with a span for each POST request, whatever its answer is."""

    def __init__(self, app: Application, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]
    ) -> None:
        """Answer a request."""
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        span = self._tracer.begin("POST", scope["headers"], {"http.request.method": "POST"})
        scope.setdefault("state", {})["span"] = span
        answering = Answering(self._app, span, ConnectionAbortedError)
        try:
            await answering.run(scope, receive, send)
        finally:
            span.end(answering.status)

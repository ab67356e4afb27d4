"""The outermost middleware: request ids, `root_path`, request counts, the access log, and 500 for exceptions.

Knows nothing of routes.
"""

import logging
import time
from collections.abc import Collection

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config.serve import LogConfig
from quire.contracts.request_ids import request_id_of
from quire.entry.http.errors import error_answer
from quire.entry.http.observed.request_lines import AccessLog, facts_of
from quire.observe.metrics import Metrics

LOG = logging.getLogger("quire")
CLIENT_GONE = 499  # status in log and metrics of a request whose client disconnected; never sent
NO_ROUTE = "other"  # metrics label of all unknown paths: a label for each would have no limit


class RequestScope:
    """Outermost middleware: request ids, metrics, access log. The id is that of `request_id_of`. Routes read it from
    `request.state.request_id`; the caller reads it from the header `x-request-id`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        root_path: str = "",
        access_log: AccessLog | None = None,
        paths: Collection[str] = (),
    ) -> None:
        self._paths = frozenset(paths)
        self._app, self._metrics, self._access_log = app, metrics, access_log or AccessLog(LogConfig())
        self._root = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = state.get("request_id") or request_id_of(scope["headers"])
        scope["path"] = self._below_root(scope["path"])
        status, complete, began = 0, False, time.monotonic()

        async def passing(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"] = list(message.get("headers", ()))
                if not any(name == b"x-request-id" for name, _ in headers):  # a route may have set its own
                    headers.append((b"x-request-id", request_id.encode()))
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, passing)
        except ClientDisconnect:
            pass
        except Exception:  # the caller gets the request id, the log gets the cause, other requests go on
            LOG.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not status:
                words = f"an internal error; the server's log has its cause under request {request_id}."
                # A retry would fail again. OpenAI's clients read x-should-retry.
                answer = error_answer(500, words, "internal_error", headers={"x-should-retry": "false"})
                await answer(scope, receive, passing)
        finally:
            outcome, refused = state.get("refused", (status if complete else CLIENT_GONE, {}))
            if "refused" not in state:  # by the protocol, which counts it
                self._metrics.http(self._label(scope), outcome, scope["method"])
            self._access_log.tell(scope, outcome, time.monotonic() - began, **(facts_of(scope) | refused))
            state.pop("ticket", None)  # the scope may wait for the garbage collection, prompts need not

    def _label(self, scope: Scope) -> str:
        """Return the metrics label of a request: the route's pattern, or its path when a middleware answered."""
        route, path = scope.get("route"), str(scope["path"])
        if route is not None:
            return str(route.path)
        return path if path in self._paths else NO_ROUTE

    def _below_root(self, path: str) -> str:
        """Return the path without `root_path`. A proxy may have removed that already."""
        return path[len(self._root) :] if self._root and path.startswith(self._root + "/") else path

"""The outermost middleware: request ids, `root_path`, request counts, the access log, and 500 for exceptions.

Knows nothing of routes.
"""

import logging
import sys
import time
from collections.abc import Collection

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config.serve import LogConfig
from quire.contracts.request_ids import request_id_of
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.errors import error_answer
from quire.observe.log_lines import JSON, json_line
from quire.observe.metrics import Metrics

LOG = logging.getLogger("quire")
CLIENT_GONE = 499  # status in log and metrics of a request whose client disconnected; never sent
NO_ROUTE = "other"  # metrics label of all unknown paths: a label for each would have no limit


class AccessLog:
    """The lines about HTTP requests: with --access-log, and at the level debug. process: name of this process"""

    def __init__(self, config: LogConfig, process: str = "http") -> None:
        self._on, self._json, self._process = config.access_log, config.log_format == JSON, process

    def tell(self, scope: Scope, status: int, seconds: float, **facts: object) -> None:
        """Print the line of an answered request. facts: further fields"""
        if not self._on and not LOG.isEnabledFor(logging.DEBUG):
            return
        client, method, path = _client(scope), scope["method"], ascii(scope["path"])[1:-1]
        request_id = scope["state"]["request_id"]
        words = "".join(f" {name}={value}" for name, value in facts.items())
        line = f"{client} {method} {path} {status} {seconds:.3f}s {request_id}{words}"
        if self._json:
            asked = {"client": client, "method": method, "path": path, "status": status, "request_id": request_id}
            key = {"key": name} if (name := caller_of(scope).name) else {}
            line = json_line("request", "info", self._process, **asked, **key, **facts, seconds=round(seconds, 6))
        print(line, file=sys.stderr)


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
        request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
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
            outcome = status if complete else CLIENT_GONE
            self._metrics.http(self._label(scope), outcome, scope["method"])
            self._access_log.tell(scope, outcome, time.monotonic() - began)

    def _label(self, scope: Scope) -> str:
        """Return the metrics label of a request: the route's pattern, or its path when a middleware answered."""
        route, path = scope.get("route"), str(scope["path"])
        if route is not None:
            return str(route.path)
        return path if path in self._paths else NO_ROUTE

    def _below_root(self, path: str) -> str:
        """Return the path without `root_path`. A proxy may have removed that already."""
        return path[len(self._root) :] if self._root and path.startswith(self._root + "/") else path


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "-"

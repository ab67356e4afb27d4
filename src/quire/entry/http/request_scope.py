"""What surrounds every request: its id, the path below `root_path`, counts, the access log and the last resort.

Knows nothing of routes.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable, Collection

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entry.http.errors import error_answer
from quire.observe.metrics import Metrics

LOG = logging.getLogger("quire")
SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
CLIENT_GONE = 499  # never sent: nobody is there to read it
NO_ROUTE = "other"  # the label of paths that lead nowhere: there is no end of them


class RequestScope:
    """The outermost middleware.

    The id is the caller's `X-Request-Id` when that is harmless, else a new one; routes find it as
    `request.state.request_id`, the caller in the answer's `x-request-id`.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, root_path: str = "", access_log: Callable[[str], None] | None = None,
        paths: Collection[str] = (),
    ) -> None:
        self._paths = frozenset(paths)
        self._app, self._metrics, self._access_log = app, metrics, access_log
        self._root = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["path"] = self._below_root(scope["path"])
        status, complete, began = 0, False, time.monotonic()

        async def passing(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"] = list(message.get("headers", ()))
                if not any(name == b"x-request-id" for name, _ in headers):  # a route may have settled on another
                    headers.append((b"x-request-id", request_id.encode()))
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, passing)
        except ClientDisconnect:
            pass
        except Exception:  # the last resort: the caller gets an id, the log the cause, other requests go on
            LOG.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not status:
                words = f"an internal error; the server's log has its cause under request {request_id}."
                # A retry would meet the same fault: clients of the OpenAI kind read x-should-retry.
                answer = error_answer(500, words, "internal_error", headers={"x-should-retry": "false"})
                await answer(scope, receive, passing)
        finally:
            outcome = status if complete else CLIENT_GONE
            self._metrics.http(self._label(scope), outcome, scope["method"])
            if self._access_log is not None:
                seconds = time.monotonic() - began
                self._access_log(f"{_client(scope)} {scope['method']} {ascii(scope['path'])[1:-1]} {outcome} "
                                 f"{seconds:.3f}s {request_id}")

    def _label(self, scope: Scope) -> str:
        """The pattern of the route; one of `paths` also when a layer before the router answered."""
        route, path = scope.get("route"), str(scope["path"])
        if route is not None:
            return str(route.path)
        return path if path in self._paths else NO_ROUTE

    def _below_root(self, path: str) -> str:
        """The path that routes know, whether or not a proxy has already taken the root away."""
        return path[len(self._root):] if self._root and path.startswith(self._root + "/") else path


def _request_id(scope: Scope) -> str:
    given: bytes = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if SANE_ID.fullmatch(given) else secrets.token_hex(16)


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "-"

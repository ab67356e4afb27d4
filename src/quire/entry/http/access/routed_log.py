"""The outermost application in front of a router: ids of requests and the access log, as `request_scope.py` has them.

A router leaves facts of a request in its state: the backend, the tries, the error. They stand in the line of the log.
"""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.contracts.request_ids import request_id_of
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.request_scope import CLIENT_GONE


class RoutedLog:
    """Middleware that names each request, and prints its line when it has ended."""

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, facts = scope.setdefault("state", {}), dict[str, object]()
        state |= {"request_id": state.get("request_id") or request_id_of(scope["headers"]), "facts": facts}
        status, complete, began = 0, False, time.monotonic()

        async def passing(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"] = list(message.get("headers", ()))
                if not any(name == b"x-request-id" for name, _ in headers):
                    headers.append((b"x-request-id", state["request_id"].encode()))
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, passing)
        except ConnectionAbortedError:
            complete = "error" in facts  # the router cut the answer off; else the client has left
            raise
        except Exception:
            status, complete = status or 500, True
            raise
        finally:
            outcome, refused = state.get("refused", (status if complete else CLIENT_GONE, {}))  # by the protocol
            self._log.tell(scope, outcome, time.monotonic() - began, **(facts | refused))

"""Who may call: API keys, on every path but those that say whether the server is alive.

Deny by default: a route that is added tomorrow needs a key without anybody remembering it. Decides by the path that the
router matches, never by the Host header or a URL built from it. Knows nothing of what the routes do.
"""

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entry.http.answers import error_answer

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})


class ApiKeys:
    """Middleware: a request shows one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`, or gets 401."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            shown = _shown_keys(scope)
            if not any([self._knows(key) for key in shown]):
                message = "this API key is not known here." if any(shown) else "an API key is needed."
                answer = error_answer(401, f"{message} Send it as `Authorization: Bearer KEY`.", "invalid_api_key",
                                      headers={"www-authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, shown: bytes) -> bool:
        """Compares with every key, each in constant time: the time says nothing about which one was near."""
        known = False
        for key in self._keys:
            known |= hmac.compare_digest(key, shown)
        return known


def _shown_keys(scope: Scope) -> list[bytes]:
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys

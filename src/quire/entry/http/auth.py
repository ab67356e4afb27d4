"""Who may call: API keys, on every path but those that say whether the server is alive; and without keys, on this
machine, nobody who was led here by a foreign name.

Deny by default: a route that is added tomorrow needs a key without anybody remembering it. Keys are asked for by the
path that the router matches, never by the Host header or a URL built from it. Knows nothing of what the routes do.
"""

import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entry.http.answers import error_answer

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})
HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d*)?")  # a name or an address, and perhaps a port


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


class OwnNames:
    """Middleware: the Host header names this machine or is one of `allowed`, or is not there; else 403.

    A web page can let its own name lead to 127.0.0.1, and then read what a server there answers. It cannot do that
    with an address, nor with localhost or a name below it.
    """

    def __init__(self, app: ASGIApp, host: str, allowed: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().removesuffix(".") for name in (host, *allowed))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        foreign = next((host for host in given if not self._is_own(host)), None)
        if scope["type"] == "http" and foreign is not None and scope["path"] not in OPEN_PATHS:
            message = (f"the Host header says {foreign[:80]!r}: without a key, this server answers only to localhost "
                       "and to addresses. Call it by those, or start it with --allowed-hosts NAME or --api-key.")
            await error_answer(403, message, "foreign_host")(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_own(self, given: str) -> bool:
        parts = HOST.fullmatch(given.strip().lower())
        name = parts[1].strip("[]").removesuffix(".") if parts else ""
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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

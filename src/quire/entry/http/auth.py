"""Who may call: API keys, on every path but those that say whether the server is alive; and without keys, on this
machine, nobody who was led here by a foreign name.

Deny by default: a route that is added tomorrow needs a key without anybody remembering it. Keys are asked for by the
path that the router matches, never by the Host header or a URL built from it. Knows nothing of what the routes do.
Sizes and times of connections are limited in `protocol.py`.
"""

import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable
from hashlib import sha256

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.serve import HttpConfig
from quire.contracts.errors import shown
from quire.entry.http.errors import error_answer

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})
WITH_BODY = ("POST", "PUT", "PATCH")
HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d*)?")  # a name or an address, and perhaps a port


class Guard:
    """Middleware: what `refusal` has an answer for is answered so, and goes no further."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope], Response | None]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)


class ApiKeys:
    """A request shows one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`, or gets 401."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __call__(self, scope: Scope) -> Response | None:
        if scope["path"] in OPEN_PATHS:
            return None
        if shown_key(scope, self._keys) is not None:
            return None
        message = "this API key is not known here." if any(_shown_keys(scope)) else "an API key is needed."
        return error_answer(401, f"{message} Send it as `Authorization: Bearer KEY`.", "invalid_api_key",
                            headers={"www-authenticate": "Bearer"})


class OwnNames:
    """The Host header names this machine or is one of `allowed`, or is not there; else 403.

    A web page can let its own name lead to 127.0.0.1, and then read what a server there answers. It cannot do that
    with an address, nor with localhost or a name below it.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        self._names = {"localhost", *(name.lower().removesuffix(".") for name in (host, *allowed))}

    def __call__(self, scope: Scope) -> Response | None:
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        foreign = next((host for host in given if not self._is_own(host)), None)
        if foreign is None or scope["path"] in OPEN_PATHS:
            return None
        message = (f"the Host header says {shown(foreign)}: without a key, this server answers only to localhost "
                   "and to addresses. Call it by those, or start it with --allowed-hosts NAME or --api-key.")
        return error_answer(403, message, "foreign_host")

    def _is_own(self, given: str) -> bool:
        parts = HOST.fullmatch(given.strip().lower())
        name = parts[1].strip("[]").removesuffix(".") if parts else ""
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def json_only(scope: Scope) -> Response | None:
    """A request with a body is declared as `application/json`, or gets 415; one without a body need not say anything.

    Not out of love of order: a web page may send a body of any other type, or of no type, to a server on its visitor's
    machine without asking, and may not send JSON.
    """
    if scope["method"] not in WITH_BODY or scope["path"] in OPEN_PATHS:
        return None
    headers: dict[bytes, bytes] = dict(scope["headers"])
    given = headers.get(b"content-type", b"")
    empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    if given.partition(b";")[0].strip().lower() == b"application/json" or (empty and not given):
        return None
    return error_answer(415, f"Content-Type is {shown(given.decode('latin-1'))}: bodies are JSON; send "
                             "`Content-Type: application/json`.", "unsupported_media_type")


def shown_key(scope: Scope, keys: Iterable[bytes]) -> bytes | None:
    """The one of `keys` that a request shows. Every pair is compared, each in constant time: the time says nothing
    about which one was near."""
    given = _shown_keys(scope)
    return next(iter([key for key in keys for one in given if hmac.compare_digest(key, one)]), None)


def owner_of(scope: Scope, http: HttpConfig) -> bytes:
    """The API key that a request shows; of a server without keys, everybody's is the same."""
    return shown_key(scope, [key.encode() for key in http.api_key]) or b""


def tenant_of(scope: Scope, http: HttpConfig) -> str:
    """The tenant of a request: a digest of its API key. "" where all callers are one tenant: with fewer than two keys,
    or with `share_prefix_cache_across_keys`."""
    if len(set(http.api_key)) < 2 or http.share_prefix_cache_across_keys:
        return ""
    return sha256(owner_of(scope, http)).hexdigest()


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

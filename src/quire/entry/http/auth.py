"""Access control: API keys on every path except the probes. Without keys, a loopback server checks the Host header.

Access is denied by default, so that a new route needs a key without further code. The decision depends on the path
that the router matches, never on the Host header or a URL built from it. Knows nothing of what the routes do.
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
    """Middleware that sends the response of `refusal`, or calls the application when `refusal` returns None."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope], Response | None]) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)


class ApiKeys:
    """Answers 401 to requests without a valid API key in `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __call__(self, scope: Scope) -> Response | None:
        if scope["path"] in OPEN_PATHS:
            return None
        if shown_key(scope, self._keys) is not None:
            return None
        message = "this API key is not valid." if any(_shown_keys(scope)) else "this server needs an API key."
        return error_answer(
            401,
            f"{message} Send a valid one as `Authorization: Bearer KEY`.",
            "invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


class OwnNames:
    """Answers 403 to requests whose Host header is neither a name of this machine nor one of `allowed`.
    This stops DNS rebinding: a web page can make its own domain name resolve to 127.0.0.1 and then read the answers of
    a server there. It cannot do so with an IP address, nor with localhost or *.localhost."""

    def __init__(self, host: str, allowed: Iterable[str] = (), *, keyed: bool = True) -> None:
        """`keyed`: this listener has the option --api-key, which would switch this check off."""
        self._keyed = keyed
        self._names = {"localhost", *(name.lower().removesuffix(".") for name in (host, *allowed))}

    def __call__(self, scope: Scope) -> Response | None:
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        foreign = next((host for host in given if not self._is_own(host)), None)
        if foreign is None or scope["path"] in OPEN_PATHS:
            return None
        message = (
            f"the Host header is {shown(foreign)}: {'without an API key, ' * self._keyed}this server accepts only "
            "localhost and IP addresses. Use one of these, or start it with --allowed-hosts NAME"
            f"{' or --api-key' * self._keyed}."
        )
        return error_answer(403, message, "foreign_host")

    def _is_own(self, given: str) -> bool:
        parts = HOST.fullmatch(given.strip().lower())
        name = parts[1].strip("[]").removesuffix(".") if parts else ""
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def json_only(scope: Scope) -> Response | None:
    """Answer 415 to a request with a body that is not declared as `application/json`. Without a body: no check.
    This protects servers on a visitor's machine: a browser lets any web page send them a body of another type, or of no
    type, without asking; for JSON it asks the server first (CORS preflight)."""
    if scope["method"] not in WITH_BODY or scope["path"] in OPEN_PATHS:
        return None
    headers: dict[bytes, bytes] = dict(scope["headers"])
    given = headers.get(b"content-type", b"")
    empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    if given.partition(b";")[0].strip().lower() == b"application/json" or (empty and not given):
        return None
    return error_answer(
        415,
        f"Content-Type is {shown(given.decode('latin-1'))}: bodies are JSON; send `Content-Type: application/json`.",
        "unsupported_media_type",
    )


def shown_key(scope: Scope, keys: Iterable[bytes]) -> bytes | None:
    """Return the first of the valid `keys` that the request's headers hold; None when they hold none.
    Every sent key is compared with every valid key in constant time, so that timing tells nothing about the keys."""
    given = _shown_keys(scope)
    return next(iter([key for key in keys for one in given if hmac.compare_digest(key, one)]), None)


def owner_of(scope: Scope, http: HttpConfig) -> bytes:
    """Return the valid API key that a request shows; b"" without a valid key, as on a server without keys."""
    return shown_key(scope, [key.encode() for key in http.api_key]) or b""


def client_of(scope: Scope, http: HttpConfig) -> str:
    """Return a name for who sends a request: the digest of its API key; without keys its address."""
    if key := owner_of(scope, http):
        return sha256(key).hexdigest()
    return str((scope.get("client") or ("",))[0])


def tenant_of(scope: Scope, http: HttpConfig) -> str:
    """Return the tenant of a request: a digest of its API key.
    Returns "" when all callers are one tenant: with fewer than two keys, or with `share_prefix_cache_across_keys`."""
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

"""Access control: API keys on every path except the probes. Without keys, a loopback server checks the Host header.

Access is denied by default, so that a new route needs a key without further code. The decision depends on the path
that the router matches, never on the Host header or a URL built from it. Knows nothing of what the routes do.
Sizes and times of connections are limited in `protocol.py`.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.contracts.errors import shown
from quire.entry.http.access.keyring import Keyring
from quire.entry.http.errors import error_answer

OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})
WITH_BODY = ("POST", "PUT", "PATCH")
HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d*)?")  # a name or an address, and perhaps a port


class Guard:
    """Middleware that sends the response of `refusal`, or calls the application when `refusal` returns None."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope], Response | None]) -> None:
        self._app, self.refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)


class ApiKeys:
    """Answers 401 to requests without a valid API key in `Authorization: Bearer KEY` or `x-api-key: KEY`.
    The routes find the key's `Caller` in the state of the request."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def __call__(self, scope: Scope) -> Response | None:
        if scope["path"] in OPEN_PATHS:
            return None
        given = _shown_keys(scope)
        if (caller := self._keyring.find(given)) is not None:
            scope.setdefault("state", {})["caller"] = caller
            return None
        message = "this API key is not valid." if any(given) else "this server needs an API key."
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
    """Answer 415 to a request with a body that is compressed, or not declared as `application/json`. Without a body: no
    check.
    This protects servers on a visitor's machine: a browser lets any web page send them a body of another type, or of no
    type, without asking; for JSON it asks the server first (CORS preflight)."""
    if scope["method"] not in WITH_BODY or scope["path"] in OPEN_PATHS:
        return None
    headers: dict[bytes, bytes] = dict(scope["headers"])
    given, coded = headers.get(b"content-type", b""), headers.get(b"content-encoding", b"identity")
    if coded.strip().lower() not in (b"", b"identity"):
        words = f"Content-Encoding is {shown(coded.decode('latin-1'))}: send the body as it is, without compression."
        return error_answer(415, words, "unsupported_media_type")
    empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    if given.partition(b";")[0].strip().lower() == b"application/json" or (empty and not given):
        return None
    return error_answer(
        415,
        f"Content-Type is {shown(given.decode('latin-1'))}: bodies are JSON; send `Content-Type: application/json`.",
        "unsupported_media_type",
    )


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

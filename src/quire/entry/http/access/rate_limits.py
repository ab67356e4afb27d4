"""Middleware that counts the requests of named API keys, and tells each caller the state of its limits in headers."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.contracts.error_bodies import MESSAGES_PATHS
from quire.entry.http.access.auth import OPEN_PATHS
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.access.limits import Allowance, KeyLimits

PARTS, KINDS = ("limit", "remaining", "reset"), ("requests", "tokens")
LIMIT_HEADERS = tuple(f"x-ratelimit-{part}-{kind}" for kind in KINDS for part in PARTS)


class RateLimits:
    """Middleware: answers 429 to a POST beyond its key's requests per minute. Other methods are not counted."""

    def __init__(self, app: ASGIApp, limits: KeyLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_of(scope) if scope["type"] == "http" else None
        if caller is None or not caller.name or scope["method"] != "POST" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return

        async def passing(message: Message) -> None:
            if message["type"] == "http.response.start":
                states, anthropic = self._limits.states(caller), MESSAGES_PATHS.search(scope["path"])
                told = [*(_anthropic(states) if anthropic else _openai(states))]
                names = {name for name, _ in told}  # a server behind a router may have limits of its own
                message["headers"] = [*(one for one in message["headers"] if one[0] not in names), *told]
            await send(message)

        refused = self._limits.take_request(caller)
        if refused is None:
            await self._app(scope, receive, passing)
            return
        answer = Response(refused.body(), refused.status, dict(refused.headers), "application/json")
        await answer(scope, receive, passing)


def _openai(states: Mapping[str, Allowance]) -> Iterator[tuple[bytes, bytes]]:
    """Yield OpenAI's headers. Times are seconds until the bucket is full."""
    for kind, state in states.items():
        yield f"x-ratelimit-limit-{kind}".encode(), b"%d" % state.limit
        yield f"x-ratelimit-remaining-{kind}".encode(), b"%d" % state.remaining
        yield f"x-ratelimit-reset-{kind}".encode(), b"%.3fs" % state.debt


def _anthropic(states: Mapping[str, Allowance]) -> Iterator[tuple[bytes, bytes]]:
    """Yield Anthropic's headers. Times are dates."""
    for kind, state in states.items():
        full = datetime.now(UTC) + timedelta(seconds=state.debt)
        yield f"anthropic-ratelimit-{kind}-limit".encode(), b"%d" % state.limit
        yield f"anthropic-ratelimit-{kind}-remaining".encode(), b"%d" % state.remaining
        yield f"anthropic-ratelimit-{kind}-reset".encode(), full.strftime("%Y-%m-%dT%H:%M:%SZ").encode()

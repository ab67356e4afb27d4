"""The place where a caller's limits are asked. The limits are those of a server; `quire route` hands them in."""

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from quire.router.asked import Send


class Spending(Protocol):
    """The tokens of a running request: its answer passes through `sending`, or `direct`."""

    def sending(self, send: Send) -> Send:
        """Return `send` with a count of what passes."""

    def direct(self, direct: Any) -> Any:
        """Return a direct body with a count of what passes; None stays None."""


class CallerGate(Protocol):
    """Limits of callers."""

    def hold(self, scope: MutableMapping[str, Any], model: str, tokens: int) -> AbstractContextManager[Spending | None]:
        """Context manager: a request that runs; its count of tokens, if there is a limit. Raises `CallerRefused`.

        tokens   of the prompt, counted or estimated
        """


class OpenGate:
    """No limits."""

    @contextmanager
    def hold(self, scope: MutableMapping[str, Any], model: str, tokens: int) -> Iterator[Spending | None]:
        """Context manager: a request that runs."""
        yield None

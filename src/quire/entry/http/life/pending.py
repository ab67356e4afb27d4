"""Operations of the core that an HTTP process waits for. Knows messages; nothing of HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any

from quire.contracts.errors import EngineError, QuireError
from quire.procs.messages import Control, Reply


class PendingOperations:
    """The operations that wait for their `Reply`. send: sends a message to the core · first: number of the first one"""

    def __init__(self, send: Callable[[Control], None], first: int) -> None:
        self._send, self._last = send, first
        self._replies: dict[int, asyncio.Future[Any]] = {}

    async def run(self, name: str, args: dict[str, Any]) -> bool | int | str | None:
        """Run an operation in the core between two steps. Return its value or raise `EngineError`."""
        self._last += 1
        number = self._last
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        try:
            self._send(Control(number, name, args))
            answer: bool | int | str | None = await reply
            return answer
        finally:
            del self._replies[number]

    def take(self, message: Reply) -> None:
        """Give a reply to its caller."""
        reply = self._replies.get(message.id)
        if reply is not None and not reply.done():
            reply.set_result(message.value) if message.error is None else reply.set_exception(
                EngineError(message.error)
            )

    def fail(self, error: QuireError) -> None:
        """End all operations with an error: the core is dead."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

"""Requests that have no token yet. When their core dies, the next one gets them again, and their clients only wait.

A request gets this once: perhaps it was the one that killed the core. Knows nothing of the core.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.entry.http.request_stream import RequestStream
from quire.procs.messages import Add


@dataclass
class _Waiting:
    adds: Sequence[Add]
    again: bool = False


class Unsent:
    """The streams without a token, with the messages that began them. on: False = it keeps none"""

    def __init__(self, *, on: bool) -> None:
        self._on, self._held = on, dict[RequestStream, _Waiting]()

    @property
    def num_requests(self) -> int:
        """Number of the core's requests in these streams: one per completion."""
        return sum(len(add.requests) for held in self._held.values() for add in held.adds)

    def hold(self, stream: RequestStream, adds: Sequence[Add]) -> None:
        """Note a stream that is sent to the core."""
        if self._on and adds:
            self._held[stream] = _Waiting(adds)

    def drop(self, stream: RequestStream) -> None:
        """Forget a stream: it has a token, or it has ended."""
        self._held.pop(stream, None)

    def keeps(self, stream: RequestStream) -> bool:
        """Return True if the next core gets this stream, and prepare it for that."""
        held = self._held.get(stream)
        parts = any(len(one.prompt_logprobs or ()) > 1 for one in stream.generations)  # came already, in part
        if held is None or held.again or parts:
            return False
        held.again = True
        for generation in stream.generations:
            generation.began = None
        return True

    def adds(self) -> Iterator[Add]:
        """Yield the messages for the next core."""
        for held in self._held.values():
            yield from held.adds

"""The two one-way sockets between a front end and its core: who reads one binds it, the other side connects.

So nothing that is sent gets lost or waits, whoever comes first. Knows ZMQ and messages.
"""

import zmq

from quire.procs.messages import CoreStart, FromCore, ToCore
from quire.procs.wire import decode_to_core, encode

LAST_WORDS_MS = 2000  # how long a core that ends waits for its last message to be taken


class CoreSockets:
    """The core's ends. One thread uses them; every queue is unbounded."""

    def __init__(self, start: CoreStart) -> None:
        self._context = zmq.Context(io_threads=1)
        self._receiver, self._sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._receiver, self._sender):
            socket.set_hwm(0)
        self._receiver.bind(start.to_core)
        self._sender.connect(start.from_core)

    def receive(self, wait: bool) -> ToCore | None:
        """The next message; None when there is none and it is not to be waited for."""
        try:
            data = self._receiver.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_to_core(data)

    def send(self, message: FromCore) -> None:
        """Queue a message; never waits."""
        self._sender.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Give the last message a moment to leave, then free everything."""
        self._receiver.close(0)
        self._sender.close(LAST_WORDS_MS)
        self._context.term()

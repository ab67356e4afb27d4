"""Messages of any length over a socket pair or a TCP connection: the length as uint32, little-endian, then the bytes.

A receiver never waits for the rest of a message: the process that sends it may have been stopped halfway.
"""

import socket
import struct
import threading

CHUNK = 1 << 16
MAX_JOINED = 1 << 16  # longer messages are not copied to stand behind their length
NO_SIGNAL = socket.MSG_NOSIGNAL if hasattr(socket, "MSG_NOSIGNAL") else 0  # a script may have SIGPIPE at its default
LENGTH = struct.Struct("<I")


class Frames:
    """End of a connection that carries whole messages of any length. Any thread may send; one thread receives.

    An end sends either by `send`, which may wait, or by `post` and `flush`, which never wait.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._buffer, self._unsent = bytearray(), bytearray()

    @classmethod
    def inherited(cls, descriptor: int) -> "Frames":
        """Return the end that the parent process passed as `descriptor`. Children of this process do not inherit it."""
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        return cls(end)

    def fileno(self) -> int:
        """Return the file descriptor, on which `poll` can wait for messages; -1 after `close`."""
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; waits while the other end's buffer is full. Raises `OSError` when the other end is gone."""
        length = LENGTH.pack(len(message))
        with self._sending:
            if len(message) <= MAX_JOINED:
                self._end.sendall(length + message, NO_SIGNAL)
            else:
                self._end.sendall(length, NO_SIGNAL)
                self._end.sendall(message, NO_SIGNAL)

    @property
    def full(self) -> bool:
        """True while posted messages, or the rest of one, wait for room in the other end's buffer."""
        return bool(self._unsent)

    def post(self, message: bytes) -> None:
        """Send a message without waiting. `flush` sends what finds no room. Raises `OSError` as `send` does."""
        with self._sending:
            self._unsent += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send posted messages as far as there is room. Raises `OSError` when the other end is gone."""
        with self._sending:
            try:
                while self._unsent:
                    del self._unsent[: self._end.send(self._unsent, NO_SIGNAL | socket.MSG_DONTWAIT)]
            except BlockingIOError:
                pass

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely, without waiting.

        Raises `EOFError` when the other end is closed and all messages were returned.
        """
        while True:
            try:
                data = self._end.recv(CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:  # the other end closed and left messages unread, or its host is gone
                data = b""
            if not data:
                if messages := self._whole():
                    return messages
                raise EOFError
            self._buffer += data
            if len(data) < CHUNK:
                break
        return self._whole()

    def _whole(self) -> list[bytes]:
        """Take the whole messages out of the buffer."""
        messages, start = [], 0
        while len(self._buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            end = start + LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(bytes(self._buffer[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages

    def close(self) -> None:
        """Close this end; idempotent. A thread that waits in `send` gets an `OSError`."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end is gone, or this one is closed
        with self._sending:
            self._end.close()

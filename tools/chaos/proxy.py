"""A TCP proxy that harms connections: it delays, cuts and half-closes them. Knows bytes; nothing of HTTP."""

import asyncio
import random
import socket
import struct
from contextlib import suppress

# Fate -> share of the connections; the others pass.
FATES = {"delay": 0.08, "cut": 0.04, "reset": 0.02, "half": 0.04}
FATAL = ("cut", "reset", "half")  # a client may lose its answer
DELAY_SECONDS = 0.3  # at most, for each piece
MOST_BYTES = 20_000  # until a fate comes
KEPT = 20_000  # fates that are remembered


class ChaosProxy:
    """A proxy to one address. `harm`: False = every connection passes."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.harm = False
        self.port = 0
        self.counts = dict.fromkeys(("pass", *FATES), 0)
        self._to, self._rng = port, rng
        self._fates: dict[int, str] = {}  # port of the client -> fate
        self._server: asyncio.Server | None = None
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End all connections, and take no more."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def harmed(self, port: int) -> bool:
        """Return True if the connection of the client at this port was cut or closed by this proxy."""
        return self._fates.get(port) in FATAL

    def slowed(self, port: int) -> bool:
        """Return True if this proxy did anything to the connection of the client at this port."""
        return self._fates.get(port, "pass") != "pass"

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[1]
        fate = "pass"
        if self.harm:
            fate = self._rng.choices([*FATES, "pass"], [*FATES.values(), 1 - sum(FATES.values())])[0]
        self._fates[client] = fate
        while len(self._fates) > KEPT:
            del self._fates[next(iter(self._fates))]
        self.counts[fate] += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            self._fates[client] = "cut"
            writer.transport.abort()
            return
        up = asyncio.create_task(self._copy(reader, back, fate, up=True))
        down = asyncio.create_task(self._copy(there, writer, fate, up=False))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if not down.done() and not up.cancelled() and up.exception() is None:
                await asyncio.wait({down})
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            for end in (back, writer):
                if fate == "reset":
                    with suppress(OSError):
                        own = end.get_extra_info("socket")
                        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.transport.abort() if fate in FATAL else end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: str, *, up: bool) -> None:
        left = self._rng.randrange(MOST_BYTES)
        while data := await reader.read(1 << 16):
            left -= len(data)
            if fate == "delay":
                await asyncio.sleep(self._rng.random() * DELAY_SECONDS)
            if fate in ("cut", "reset") and left < 0 and not up:
                raise ConnectionAbortedError(fate)
            writer.write(data)
            await writer.drain()
            if fate == "half" and up:
                writer.write_eof()  # the rest of the request never comes, and the answer may
                return
        if up or fate == "half":
            with suppress(OSError):
                writer.write_eof()

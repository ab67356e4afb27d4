"""Connections before their TLS handshake: bounded in number and time, and an accept that fails is told once."""

import asyncio
import errno
import gc
import shutil
import socket
import ssl
import subprocess
from asyncio import sslproto
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quire.entry.http.access import doorway
from quire.entry.http.access.doorway import Doorway

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")


class Broken(socket.socket):
    """A listening socket whose first 5 accepts find no file."""

    failed = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.failed += 1
        if self.failed <= 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder = tmp_path_factory.mktemp("certificate")
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    files = ["-keyout", key, "-out", certificate]
    if shutil.which("openssl") is None or subprocess.run([*command.split(), *files], capture_output=True).returncode:
        pytest.skip("no openssl to make a certificate with")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(certificate, key)
    return made


@asynccontextmanager
async def opened(listener: socket.socket, context: ssl.SSLContext | None, room: int = 1000) -> AsyncIterator[Doorway]:
    with listener:
        door = Doorway(Greeting, listener, context, 100, lambda: room)
        yield door
        door.close()
        await door.wait_closed()


async def silent(listener: socket.socket, number: int) -> list[Peer]:
    return [await asyncio.open_connection(*listener.getsockname()[:2]) for _ in range(number)]


async def greeted(listener: socket.socket) -> None:
    unchecked = ssl._create_unverified_context()
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2], ssl=unchecked)
    assert await reader.readexactly(5) == b"hello"
    writer.transport.abort()


def close(peers: list[Peer]) -> None:
    for _, writer in peers:
        writer.transport.abort()


@pytest.mark.parametrize(("most", "room"), [(4, 1000), (1000, 4)])
def test_silent_peers_keep_nobody_out(
    most: int, room: int, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "HANDSHAKES", most)
    monkeypatch.setattr(doorway, "FEW", 1)
    monkeypatch.setattr(doorway, "PATIENCE", 0.01)

    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with opened(listener, context, room) as door:
            peers = await silent(listener, 10)
            await greeted(listener)
            assert len(door._shaking) <= 4
            for reader, _ in peers[:6]:
                assert await reader.read() == b""
            assert not any(reader.at_eof() for reader, _ in peers[-3:])
        close(peers)

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("sent", [b"", b"no TLS at all"])
def test_a_handshake_that_fails_leaves_no_buffer(
    sent: bytes, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "HANDSHAKE", 60.0 if sent else 0.01)

    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with opened(listener, context):
            peers = await silent(listener, 3)
            for reader, writer in peers:
                writer.write(sent)
                await reader.read()
            close(peers)
            kept = [each for each in gc.get_objects() if type(each) is sslproto.SSLProtocol]
            assert not kept

    gc.collect()
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        gc.enable()


def test_failed_accepts_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "RETRY", 0.0)

    async def work() -> None:
        listener = Broken()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with opened(listener, None):
            peers = await silent(listener, 1)
            assert await peers[0][0].readexactly(5) == b"hello"
            assert listener.failed > 5
        close(peers)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert [words for _, _, words in caplog.record_tuples] == [
        "no connection can be accepted (Too many open files): tried again each second."
    ]


def test_a_doorway_closes_twice_and_refuses_from_then_on() -> None:
    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        door = Doorway(asyncio.Protocol, listener, None, 8, lambda: 8)
        door.close()
        door.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(work())

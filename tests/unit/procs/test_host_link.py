"""Connections between hosts: a wrong key, another protocol, silence and repetition are refused on both sides."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from quire.contracts.errors import ConfigError
from quire.procs import host_link
from quire.procs.host_link import LENGTH, MAGIC, REFUSED, SIZE, NotMaster, connect, interface_of, listen, welcome

from ...support.started_ranks import nothing_left

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


class Master:
    """A listener that welcomes one peer with a key, in a thread. `result`: its hello, or the error."""

    def __init__(self, key: bytes = KEY, serve: Callable[[socket.socket], object] | None = None) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.result: object = None
        self._serve = serve or (lambda connection: welcome(connection, key))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            try:
                self.result = self._serve(connection)
            except Exception as error:
                self.result = error

    def end(self) -> object:
        self._thread.join()
        self.listener.close()
        return self.result


def test_two_ends_with_the_same_key_meet() -> None:
    def serve(connection: socket.socket) -> bytes:
        hello = welcome(connection, KEY)
        connection.sendall(b"plan")
        return hello

    master = Master(serve=serve)
    with connect("127.0.0.1", master.port, KEY, b"hello") as connection:
        assert connection.recv(16) == b"plan"
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) and connection.getblocking()
    assert master.end() == b"hello"


def test_a_peer_with_another_key_is_refused_and_told() -> None:
    master = Master()
    with pytest.raises(ConfigError, match="has another key: set QUIRE_CLUSTER_KEY"):
        connect("127.0.0.1", master.port, b"other" * 8, b"hello")
    assert isinstance(master.end(), PermissionError)


def test_a_master_with_another_key_is_not_believed() -> None:
    """It takes every proof, and cannot make its own."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(MAGIC + bytes(SIZE))
        connection.recv(1 << 16)
        connection.sendall(b"p" * SIZE)

    master = Master(serve=serve)
    with pytest.raises(ConfigError, match="another key"):
        connect("127.0.0.1", master.port, KEY, b"hello")
    master.end()


def test_a_proof_cannot_be_used_again() -> None:
    said: list[bytes] = []

    def overhear(connection: socket.socket) -> None:
        connection.sendall(MAGIC + bytes(SIZE))
        while len(said) == 0 or len(b"".join(said)) < 2 * SIZE + LENGTH.size + 5:
            said.append(connection.recv(1 << 16))

    false = Master(serve=overhear)
    with pytest.raises((NotMaster, ConfigError, OSError)):
        connect("127.0.0.1", false.port, KEY, b"hello")
    false.end()
    master = Master()
    with socket.create_connection(("127.0.0.1", master.port)) as connection:
        connection.recv(len(MAGIC) + SIZE)
        connection.sendall(b"".join(said))
        assert connection.recv(SIZE) == REFUSED
    assert isinstance(master.end(), PermissionError)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(SIZE) + LENGTH.pack(1 << 30), bytes(200)])
def test_a_peer_that_speaks_otherwise_is_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "HANDSHAKE_SECONDS", 0.5)
    master = Master()
    with socket.create_connection(("127.0.0.1", master.port)) as connection:
        connection.sendall(sent)
        if not sent:
            connection.shutdown(socket.SHUT_WR)
        assert isinstance(master.end(), PermissionError | OSError | NotMaster)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_on_the_port_is_no_master(said: bytes) -> None:
    master = Master(serve=lambda connection: said and connection.sendall(said))
    with pytest.raises((NotMaster, OSError)):
        connect("127.0.0.1", master.port, KEY, b"hello")
    master.end()


def test_only_an_address_of_this_host_is_listened_on() -> None:
    for address, words in (
        ("0.0.0.0", "cannot connect to this address"),
        ("192.0.2.1", "cannot listen"),
        ("no.such.host.invalid", "cannot listen"),
    ):
        with pytest.raises(ConfigError, match=f"master_addr={address}.*{words}"):
            listen(address, 0)
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="cannot listen on port"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))
        assert interface_of(asking.getsockname()[0])

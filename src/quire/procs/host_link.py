"""TCP connections between the hosts of an engine. Both ends prove that they know the cluster's key.

    master -> peer    MAGIC, 32 random bytes
    peer -> master    32 random bytes, length of the hello as uint32, hello, proof of all that was said
    master -> peer    its own proof; or REFUSED, and the end of the connection

A proof is an HMAC with SHA-256. It shows the key to nobody and cannot be used again. What follows is neither encrypted
nor signed, like the tensors that gloo and NCCL exchange: hosts need a network that only they can reach.
"""

import fcntl
import hmac
import ipaddress
import secrets
import socket
import struct
import sys
import time

from quire.contracts.errors import ConfigError

MAGIC = b"quire/1\n"
SIZE = 32  # bytes of a random number and of a proof
REFUSED = bytes(SIZE)
MAX_HELLO = 1 << 16
HANDSHAKE_SECONDS = 10.0
RETRY_SECONDS = 0.5
LENGTH = struct.Struct("<I")
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


class NotMaster(Exception):
    """The peer did not answer as a master does. Another try may succeed."""


def listen(address: str, port: int) -> socket.socket:
    """Listen on exactly this address; port 0 is any free one. Raises `ConfigError` when that is impossible."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(place[0]).is_unspecified:
            raise ConfigError(
                f"master_addr={address}: other hosts cannot connect to this address. Give the address by "
                "which they reach this host."
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"master_addr={address}: this host cannot listen on port {port} of that address: "
            f"{error.strerror}. Give an address of this host and a free master_port."
        ) from None
    return listener


def connect(address: str, port: int, key: bytes, hello: bytes, seconds: float = HANDSHAKE_SECONDS) -> socket.socket:
    """Connect to a master and say hello. Raises `ConfigError` if it refuses the key, `OSError` and `NotMaster`."""
    until = time.monotonic() + seconds
    connection = socket.create_connection((address, port), seconds)
    try:
        if _read(connection, len(MAGIC), until) != MAGIC:
            raise NotMaster(f"the process that listens on {address}:{port} is no engine of Quire")
        theirs, ours = _read(connection, SIZE, until), secrets.token_bytes(SIZE)
        said = theirs + ours + LENGTH.pack(len(hello)) + hello
        connection.sendall(said[SIZE:] + _proof(key, b"peer", said))
        answer = _read(connection, SIZE, until)
        if not hmac.compare_digest(answer, _proof(key, b"master", said)):
            raise ConfigError(
                f"the engine on {address}:{port} has another key: set QUIRE_CLUSTER_KEY to the same text on all hosts."
            )
    except BaseException:
        connection.close()
        raise
    return _tuned(connection)


def welcome(connection: socket.socket, key: bytes) -> bytes:
    """Ask a new peer for its proof; return its hello. Raises `PermissionError` for a wrong key, `OSError`, `NotMaster`.

    The caller closes the connection after an error.
    """
    until = time.monotonic() + HANDSHAKE_SECONDS
    connection.settimeout(HANDSHAKE_SECONDS)
    ours = secrets.token_bytes(SIZE)
    connection.sendall(MAGIC + ours)
    begin = _read(connection, SIZE + LENGTH.size, until)
    (length,) = LENGTH.unpack_from(begin, SIZE)
    if length > MAX_HELLO:
        raise PermissionError("its hello is too long")
    hello = _read(connection, length, until)
    said = ours + begin + hello
    if not hmac.compare_digest(_read(connection, SIZE, until), _proof(key, b"peer", said)):
        connection.sendall(REFUSED)
        raise PermissionError("it has another key")
    connection.sendall(_proof(key, b"master", said))
    _tuned(connection)
    return hello


def interface_of(address: str) -> str:
    """Return the name of this host's network interface with an IPv4 address; "" when it is not found."""
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
                except OSError:
                    continue  # it has no IPv4 address
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _proof(key: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + said, "sha256")


def _read(connection: socket.socket, count: int, until: float) -> bytes:
    """Read exactly `count` bytes. Raises `NotMaster` if the connection ends before, `TimeoutError` after `until`."""
    data = bytearray()
    while len(data) < count:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(left)
        if not (part := connection.recv(count - len(data))):
            raise NotMaster("the peer closed the connection")
        data += part
    return bytes(data)


def _tuned(connection: socket.socket) -> socket.socket:
    """Make the socket blocking and prompt. The system then notices within a minute that the other host is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection

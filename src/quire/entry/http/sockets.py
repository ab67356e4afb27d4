"""The socket a server listens on. It is bound before the model is loaded, so that a busy port fails at once.

Knows addresses and, on Linux, the process that holds a port. Knows nothing of HTTP.
"""

import contextlib
import errno
import os
import re
import resource
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from quire.config.serve import HttpConfig
from quire.contracts.errors import AddressTaken, ConfigError

BACKLOG = 2048
RESERVED_FILES = 128  # file descriptors kept for other uses than connections
MAX_CONNECTIONS = 16_384
LISTENING = "0A"  # state of a socket in /proc/net/tcp
NEIGHBOURS = 20  # number of ports after a busy one that are tried, to propose a free one
SECRET_FLAG = re.compile(r"--?[\w-]*(key|token(?!s|iz)|passw|secret|credential)[\w-]*", re.IGNORECASE)


def listen(config: HttpConfig) -> socket.socket:
    """Bind and listen. For a busy port, raises a `ConfigError` that names its process and a free port."""
    if config.uds is not None:
        return _listen_unix(config.uds)
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host={config.host!r} has no address ({error}): use an address of this machine.") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)  # with the protocol, by which asyncio turns Nagle's delay off
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: until then another server could bind the same port
    except OSError as error:
        listener.close()
        kind = AddressTaken if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(_explain(error, config)) from None
    return listener


def url_of(listener: socket.socket, config: HttpConfig) -> str:
    """Return the server's URL for clients on this machine, with the real port when the option was 0."""
    scheme = "https" if config.ssl_certfile else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def release(listener: socket.socket, config: HttpConfig) -> None:
    """Close the socket, and remove a Unix socket's file; idempotent."""
    listener.close()
    if config.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(config.uds)


def max_connections(files: int = 1) -> int:
    """Raise this process's limit of open files if needed. Return the number of connections that the limit allows, each
    of which needs `files`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files * MAX_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # some systems cap below their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    allowed = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else (soft - RESERVED_FILES) // files
    return max(16, min(MAX_CONNECTIONS, allowed))


def port_holder(port: int) -> str | None:
    """Return the process that listens on a TCP port, as "process 12 (python -m http.server)"; None if unknown."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listeners(table, port)}
    for folder in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(os.readlink(link) in inodes for link in (folder / "fd").iterdir()):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
                return f"process {folder.name} ({' '.join(without_secrets(words))[:80]})"
    return None


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line without secrets: all words after a flag for keys, tokens or passwords become ***."""
    shown: list[str] = []
    hiding = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if word.startswith("--") or (not hiding and SECRET_FLAG.fullmatch(flag)):
            hiding = SECRET_FLAG.fullmatch(flag) is not None
            shown += [flag + equals + "***" if equals else f"{flag} ***"] if hiding else [word]
        elif not hiding:
            shown.append(word)
    return shown


def _listeners(table: str, port: int) -> list[str]:
    try:
        lines = Path("/proc/net", table).read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]


def _explain(error: OSError, config: HttpConfig) -> str:
    where = f"port {config.port} of {config.host}"
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(config.port) or "another process"
        return f"{where} is in use by {holder}: stop it, or use --port {_free_port(config)}."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where} needs privileges that this process does not have: use --port 8000."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host={config.host!r} is not an address of this machine: use --host 127.0.0.1, or 0.0.0.0 for all."
    return f"cannot listen on {where}: {error.strerror}."


def _free_port(config: HttpConfig) -> int:
    for port in range(config.port + 1, min(config.port + NEIGHBOURS, 65536)):
        with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((config.host, port))
                return port
    return 0


def _listen_unix(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"uds={path!r} is a file and not a socket: give another path.")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise AddressTaken(f"uds={path!r}: another server listens there: stop it, or give another path.")
        os.unlink(path)  # left by a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on uds={path!r} ({error.strerror or error}): give another path.") from None
    return listener

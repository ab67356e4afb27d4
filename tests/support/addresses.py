"""Addresses for engines of tests that find each other."""

import socket
from contextlib import ExitStack, suppress


def free_address(ports: int = 1) -> str:
    """Return HOST:PORT of the first of free ports of loopback that follow each other."""
    while True:
        with ExitStack() as taken, suppress(OSError, OverflowError):
            first = 0
            for number in range(ports):
                free = taken.enter_context(socket.socket())
                free.bind(("127.0.0.1", first + number if first else 0))
                first = first or free.getsockname()[1]
            return f"127.0.0.1:{first}"

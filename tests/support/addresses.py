"""Addresses for engines of tests that find each other."""

import os
import random
import socket
from contextlib import ExitStack, suppress

# Sockets that ask for any port get one above these: none of these is taken between the test and its engine.
PORTS = range(10_000, 32_000)
_RANDOM = random.Random(os.urandom(8))  # processes that run tests at the same time take others


def free_port(ports: int = 1) -> int:
    """Return the first of free ports of loopback that follow each other."""
    while True:
        first = _RANDOM.choice(PORTS)
        with ExitStack() as taken, suppress(OSError):
            for number in range(ports):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", first + number))
            return first


def free_address(ports: int = 1) -> str:
    """Return HOST:PORT of the first of free ports of loopback that follow each other."""
    return f"127.0.0.1:{free_port(ports)}"

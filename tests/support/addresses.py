"""Addresses for engines of tests that find each other."""

import socket


def free_address() -> str:
    """Return HOST:PORT of a free port of loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"

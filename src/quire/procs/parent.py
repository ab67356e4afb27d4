"""The side of the child in `ChildProcess`: its parameters on standard input, and the end of its parent."""

import os
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import TypeVar

import msgspec

S = TypeVar("S")


def start_line(start: msgspec.Struct) -> bytes:
    """Return the parameters of a child process as a line for its standard input, which `read_start` reads.

    The line is msgpack in Base64: JSON has no infinity, which options such as queue_timeout may have.
    """
    return b64encode(msgspec.msgpack.encode(start))


def read_start(kind: type[S], module: str) -> S:
    """Return the parameters of this process: a line on standard input. `module`: its name, for messages."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (data := os.read(sys.stdin.fileno(), 1 << 16)):  # unbuffered: a buffer could hold later input
            sys.exit(f"{module} is started by `quire serve`, with its configuration on standard input.")
        line += data
    return msgspec.msgpack.decode(b64decode(line), type=kind)


def end_with_parent(last: Callable[[], object]) -> None:
    """End this process when standard input ends: the parent is gone. `last` is called before."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1 << 16):
            pass
        last()
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent", daemon=True).start()

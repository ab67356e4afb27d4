"""The side of the child in `ChildProcess`: its parameters on standard input, and the end of its parent."""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

S = TypeVar("S")


def read_start(kind: type[S], module: str) -> S:
    """Return the parameters of this process: a line of JSON on standard input. `module`: its name, for messages."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (data := os.read(sys.stdin.fileno(), 1 << 16)):  # unbuffered: a buffer could hold later input
            sys.exit(f"{module} is started by `quire serve`, with its configuration on standard input.")
        line += data
    return msgspec.json.decode(line, type=kind)


def end_with_parent(last: Callable[[], object]) -> None:
    """End this process when standard input ends: the parent is gone. `last` is called before."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1 << 16):
            pass
        last()
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent", daemon=True).start()

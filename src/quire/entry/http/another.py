"""A further HTTP process of a server with --api-server-count: `python -m quire.entry.http.another`."""

import os
import socket
import sys

import msgspec

from quire.config.serve import ServerConfig
from quire.entry.http.console import Console
from quire.procs.fronts import FrontPlace
from quire.procs.parent import end_with_parent, read_start


class FrontStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of an HTTP process. `listener`: descriptor of the socket on which all of them listen."""

    config: ServerConfig
    place: FrontPlace
    listener: int


def main() -> int:
    """Serve until the first HTTP process ends this one, or is gone. Return the exit code."""
    from quire.entry.http.server import run

    start = read_start(FrontStart, "quire.entry.http.another")
    end_with_parent(lambda: None)
    with open(os.devnull, "w") as nowhere:  # the first process tells the user
        return run(start.config, Console(start.config, nowhere), start.place, socket.socket(fileno=start.listener))


if __name__ == "__main__":
    sys.exit(main())

"""The process of a further front end: its start, seen from the first one, and its parameters, seen from itself."""

import msgspec

from quire.config.serve import ServerConfig
from quire.procs.child_process import ChildProcess
from quire.procs.fronts import FrontPlace


class FrontStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a front end. `listener`: descriptor of the socket on which all of them accept connections."""

    config: ServerConfig
    place: FrontPlace
    listener: int


def start_front(module: str, config: ServerConfig, listener: int, place: FrontPlace) -> ChildProcess:
    """Start the process of a front end, the Python module `module`. See `FrontStart`."""
    start = FrontStart(config=config, place=place, listener=listener)
    return ChildProcess(module, msgspec.json.encode(start), descriptors=(listener,))

"""Several front ends of one engine core, each a process: their places, and the part of each in the core's outputs.

The first front end starts the core and the others. The number of a request or an operation
tells the front end that made it.
"""

from collections.abc import Iterator

import msgspec

from quire.config.serve import ServerConfig
from quire.contracts.output import BY_HANDLE, StepOutputs
from quire.procs.child_process import ChildProcess
from quire.procs.parent import start_line

NUMBERS = 2**31  # of requests: they travel as int32


class FrontPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a front end among the `count` front ends of a core. `folder`: of the sockets; "": not made yet."""

    number: int = 0
    count: int = 1
    folder: str = ""

    @property
    def first(self) -> int:
        """First number of its requests and operations."""
        return self.number * (NUMBERS // self.count)

    @property
    def end(self) -> int:
        """End of its numbers: they are below this one."""
        return self.first + NUMBERS // self.count

    @property
    def to_core(self) -> str:
        """Address of the socket to the core."""
        return f"ipc://{self.folder}/to"

    @property
    def from_core(self) -> str:
        """Address of the socket from the core to this front end."""
        return f"ipc://{self.folder}/from{self.number or ''}"

    def every(self) -> "list[FrontPlace]":
        """Return the places of all front ends."""
        return [msgspec.structs.replace(self, number=number) for number in range(self.count)]


ALONE = FrontPlace()


class FrontStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a front end. `listener`: descriptor of the socket on which all of them accept connections."""

    config: ServerConfig
    place: FrontPlace
    listener: int


def start_front(module: str, config: ServerConfig, listener: int, place: FrontPlace) -> ChildProcess:
    """Start the process of a front end, the Python module `module`. See `FrontStart`."""
    start = FrontStart(config=config, place=place, listener=listener)
    return ChildProcess(module, start_line(start), descriptors=(listener,))


def owner(number: int, count: int) -> int:
    """Return the number of the front end, of `count`, that made a request or an operation with this number."""
    return number // (NUMBERS // count)


def parts(outputs: StepOutputs, count: int) -> Iterator[StepOutputs]:
    """Yield the outputs for each of `count` front ends. All get the engine's state; only the first counts the step."""
    owners = outputs.handles // (NUMBERS // count)
    for number in range(count):
        mine = owners == number
        counted = {"num_elsewhere": int((~mine).sum())} if number == 0 else {"step": -1}
        yield StepOutputs(
            handles=outputs.handles[mine],
            tokens=outputs.tokens[mine],
            finished=tuple(finish for finish in outputs.finished if owner(finish.handle, count) == number),
            preempted=tuple(handle for handle in outputs.preempted if owner(handle, count) == number),
            stats=msgspec.structs.replace(outputs.stats, **counted),
            adapters=outputs.adapters,
            **{
                name: {
                    handle: value for handle, value in getattr(outputs, name).items() if owner(handle, count) == number
                }
                for name in BY_HANDLE
            },
        )

"""Several front ends of one engine core, each a process: their places, and the part of each in the core's outputs.

The first front end starts the core and the others. The number of a request or an operation
tells the front end that made it.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.config.serve import ServerConfig
from quire.contracts.output import BY_HANDLE, StepOutputs
from quire.procs.child_process import ChildProcess
from quire.procs.parent import start_line

NUMBERS = 2**31  # of requests: they travel as int32
MOST_RESTARTS = 5  # of a front end within RESTART_SECONDS
RESTART_SECONDS = 60.0
FIRST_WAIT = 0.5  # seconds from the end of a front end to the start of the next; it doubles with each end


class FrontPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a front end among the `count` front ends of a core.

    folder   folder of the sockets; "": not made yet
    again    number of processes that had this place before
    core     number of cores that the server had before
    """

    number: int = 0
    count: int = 1
    folder: str = ""
    again: int = 0
    core: int = 0

    @property
    def first(self) -> int:
        """First number of its requests and operations.

        A place has a range of numbers with two halves, which its processes use in turn. So messages of a process that
        has ended, and outputs for it, are not taken for those of the next one.
        """
        return self.number * (NUMBERS // self.count) + self.again % 2 * (NUMBERS // self.count // 2)

    @property
    def end(self) -> int:
        """End of its numbers: they are below this one."""
        return self.first + NUMBERS // self.count // 2

    @property
    def to_core(self) -> str:
        """Address of the socket to the core."""
        return f"ipc://{self.folder}/to{self._of_core}"

    @property
    def from_core(self) -> str:
        """Address of the socket from the core to this front end."""
        return f"ipc://{self.folder}/from{self.number or ''}{f'.{self.again}' * bool(self.again)}{self._of_core}"

    @property
    def _of_core(self) -> str:
        """End of the names of sockets. Nothing that waits in a socket of a dead core reaches the next one."""
        return f"_{self.core}" * bool(self.core)

    @property
    def next(self) -> "FrontPlace":
        """Return the place for the process that follows this one."""
        return msgspec.structs.replace(self, again=self.again + 1)

    def every(self) -> "list[FrontPlace]":
        """Return the places of all front ends."""
        return [msgspec.structs.replace(self, number=number) for number in range(self.count)]

    def of_core(self, core: int) -> "FrontPlace":
        """Return the place of the same process in front of another core."""
        return msgspec.structs.replace(self, core=core)


ALONE = FrontPlace()


class FrontStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a front end. `listener`: descriptor of the socket on which all of them accept connections."""

    config: ServerConfig
    place: FrontPlace
    listener: int


class Restarts:
    """Front ends that have ended: how often, and when each is started again."""

    def __init__(self) -> None:
        self._ends: dict[int, list[float]] = {}
        self._due: dict[FrontPlace, float] = {}

    def ended(self, place: FrontPlace, now: float) -> float | None:
        """Note the end of a front end. Return the seconds to wait for the next one; None: it ends too often.
        `now`: monotonic time"""
        ends = self._ends[place.number] = [
            *(end for end in self._ends.get(place.number, ()) if now - end < RESTART_SECONDS),
            now,
        ]
        if len(ends) > MOST_RESTARTS:
            return None
        wait = FIRST_WAIT * 2 ** (len(ends) - 1)
        self._due[place.next] = now + wait
        return wait

    def due(self, now: float) -> list[FrontPlace]:
        """Take the places at which a front end is started now."""
        places = [place for place, due in self._due.items() if due <= now]
        for place in places:
            del self._due[place]
        return places


def start_front(module: str, config: ServerConfig, listener: int, place: FrontPlace) -> ChildProcess:
    """Start the process of a front end, the Python module `module`. See `FrontStart`."""
    start = FrontStart(config=config, place=place, listener=listener)
    return ChildProcess(module, start_line(start), descriptors=(listener,))


def remove_sockets(*addresses: str) -> None:
    """Remove the files of sockets on which nobody listens any more, if they are there."""
    for address in addresses:
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


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

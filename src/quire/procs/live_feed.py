"""The feed of the live view, in the core's process: begins and ends recording, and makes frames.

A front end asks for one frame at a time, with `NextFrame`, and asks again when it has the frame. So a process that is
slow, stopped or gone gets no more than one. When nobody has asked for `LEASE` seconds, recording ends.
"""

import time
from collections.abc import Callable, Iterator

from quire.contracts.live import LiveExperts, LiveFrame
from quire.engine.core import EngineCore
from quire.engine.replicas import Core, Replicas
from quire.procs.messages import FromCore, Watched

INTERVAL = 0.1  # seconds between two frames
SHARE = 0.003  # most of the core's time that goes into frames; they become rarer when they take longer
LEASE = 3.0
EXPERTS_EVERY = 10  # frames; their loads are sent again for those who have begun to watch


class LiveFeed:
    """Makes the frames of a core for the front ends that ask. One thread calls it.

    active  True: steps and requests are recorded
    """

    def __init__(
        self, core: Core, send: Callable[[FromCore], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._send, self._clock = core, send, clock
        self.active = False
        self._asked = set[int]()
        self._number, self._sent, self._due, self._cost = 0, 0.0, 0.0, 0.0
        self._usual = INTERVAL * SHARE  # seconds for a frame; it follows the measured ones without their peaks
        self._loads: list[list[int]] = []

    def ask(self, place: int) -> None:
        """Give the next frame to front end number `place`, too. Recording begins with the first one that asks."""
        self._asked.add(place)
        if not self.active:
            self.active = True
            self._number, self._sent, self._due = 0, self._clock(), 0.0
            for _, core in living(self._core):
                core.watch(True)
        self.tell()

    def tell(self) -> None:
        """Send a frame, if it is due and somebody has asked. End recording when nobody asks any more."""
        now = self._clock()
        if now < self._due:
            return
        if self._asked:
            began = time.thread_time()
            self._number += 1
            self._send(Watched(tuple(sorted(self._asked)), self._frame(now)))
            self._asked.clear()
            self._cost = time.thread_time() - began  # of the processor: other processes may take it away meanwhile
            self._usual = min(self._cost, 2 * self._usual)
            self._sent, self._due = now, now + max(INTERVAL, self._usual / SHARE)
        elif now - self._sent > LEASE:
            self.active = False
            for _, core in living(self._core):
                core.watch(False)

    def _frame(self, now: float) -> LiveFrame:
        recorders = [(number, core.recorder) for number, core in living(self._core)]
        return LiveFrame(
            frame=self._number,
            at=time.time(),
            seconds=now - self._sent,
            cost_s=self._cost,
            engines=[recorder.frame(number) for number, recorder in recorders if recorder is not None],
            experts=self._experts(),
            tenants={
                handle: tenant
                for _, recorder in recorders
                if recorder is not None
                for handle, tenant in recorder.tenants().items()
            },
        )

    def _experts(self) -> LiveExperts | None:
        """Return the loads of experts, if they are new, and in every tenth frame."""
        balancer = self._core.balancer if isinstance(self._core, Replicas) else None
        if balancer is None or not balancer.loads:
            return None
        if balancer.loads is self._loads and self._number % EXPERTS_EVERY:
            return None
        self._loads = balancer.loads
        return LiveExperts(loads=balancer.loads, balancedness=balancer.balancedness)


def living(core: Core) -> Iterator[tuple[int, EngineCore]]:
    """Yield the cores of replicas that live, with their numbers."""
    if isinstance(core, EngineCore):
        yield 0, core
        return
    live = core.live
    yield from ((number, one) for number, one in enumerate(core.cores) if one in live)

"""A profile of some steps, in the core's process: the times of its calls, and what every model runner adds.

One at a time, bounded in steps, seconds and slices. Functions are wrapped while the profile runs, and put back at its
end. An idle core looks at the time twice a second.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.contracts.errors import QuireError
from quire.contracts.output import StepStats
from quire.engine.replicas import Core
from quire.observe.call_times import CallTimes, Slice
from quire.procs.live_feed import living
from quire.procs.messages import Control, FromCore, Reply
from quire.procs.request_trace import core_stops

LOG = logging.getLogger("quire")
PROFILE = "profile"  # name of the `Control`
BUSY = "profile_runs"
MOST_SLICES = 200_000  # of all ranks together; as many again in the core
MOST_OF_RANK = 50_000  # calls, and as many operators and kernels, that a rank keeps and sends
STEPS = "steps"  # track of the steps


class StepProfiled(msgspec.Struct, kw_only=True):
    """Slices of the core and of its model runners.

    begin, end   nanoseconds since 1970
    parts        part of the engine -> its slices
    facts        of each slice of the track "steps", in order: the counters of the step
    lost         slices that were left out, because there were too many
    notes        sentences about what is missing, each with the part that misses it
    """

    begin: int
    end: int
    parts: dict[str, list[Slice]]
    facts: list[dict[str, int]]
    lost: int = 0
    notes: list[str] = []


class StepProfile:
    """Profiles a core for a front end that asks. One thread calls it.

    active  True: a profile runs
    """

    def __init__(
        self, core: Core, send: Callable[[FromCore], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._send, self._clock = core, send, clock
        self.active = False
        self._asked, self._token, self._until, self._left = 0, "", 0.0, 0
        self._times: CallTimes | None = None
        self._begin = 0
        self._steps: list[tuple[int, int, StepStats]] = []  # begin, nanoseconds, counters

    def ask(self, message: Control, *, busy: bool) -> None:
        """Begin a profile, and reply when it is complete. Arguments of the message:

        on        False: the caller whose `token` this is has left
        seconds, steps   the profile ends with the first of these limits
        busy      True: another recording of the core's calls waits or runs
        """
        args = message.args
        if not args["on"]:
            if self.active and args["token"] == self._token:
                self._stop()
            self._send(Reply(message.id, True))
            return
        if busy or self.active:
            self._send(Reply(message.id, msgspec.json.encode({"refused": BUSY}).decode()))
            return
        self._asked, self._token, self._steps, self._begin = message.id, args["token"], [], time.time_ns()
        self._until, self._left = self._clock() + args["seconds"], args["steps"]
        self.active = True
        try:
            self._times = CallTimes(core_stops(self._core), MOST_SLICES).__enter__()
            self._control(on=True)
        except Exception as error:  # the caller is told; the engine goes on
            self._stop()
            self._send(Reply(self._asked, error=f"there is no profile: {type(error).__name__}: {error}"))

    def stepped(self, begun: int, stats: StepStats) -> None:
        """Note a step that has just ended. begun: nanoseconds since 1970"""
        if stats.step >= 0:
            self._steps.append((begun, time.time_ns() - begun, stats))
            self._left -= 1

    def tell(self) -> None:
        """Reply if the profile is complete."""
        if self._left > 0 and self._clock() < self._until:
            return
        try:
            value = msgspec.json.encode(self._whole()).decode()
        except Exception as error:
            words = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._send(Reply(self._asked, error=f"there is no profile: {words}"))
        else:
            self._send(Reply(self._asked, value))
        finally:
            self._stop()

    def _whole(self) -> StepProfiled:
        assert self._times is not None
        times, self._times = self._times, None
        times.__exit__(None, None, None)
        end, told = time.time_ns(), self._control(on=False)
        own: list[Slice] = [(STEPS, f"step {stats.step}", begin, spent) for begin, spent, stats in self._steps]
        found = StepProfiled(
            begin=self._begin,
            end=end,
            parts={"engine core": own + times.slices()},
            facts=[_facts(stats) for _, _, stats in self._steps],
            lost=times.lost,
        )
        for name, (slices, lost, note) in told.items():
            found.parts[name] = slices[: MOST_SLICES // len(told)]
            found.lost += lost + len(slices) - len(found.parts[name])
            if note:
                found.notes.append(f"{name}: {note}")
        return found

    def _stop(self) -> None:
        self.active = False
        if self._times is not None:
            self._times.__exit__(None, None, None)
            self._times = None
            try:
                self._control(on=False)
            except Exception:  # the engine goes on; a dead one is found by its next step
                LOG.exception("the profile of a model runner could not be ended")

    def _control(self, *, on: bool) -> dict[str, tuple[list[Slice], int, str]]:
        """Begin or end the profiles of all model runners.

        Return name of the runner -> slices, number of lost ones, and a note or "".
        """
        found: dict[str, tuple[list[Slice], int, str]] = {}
        cores = list(living(self._core))
        for number, core in cores:
            ranks: Any = core.executor.control(PROFILE, {"on": on, "most": MOST_OF_RANK})
            for rank, told in enumerate(ranks):
                name = f"rank {rank}" if len(ranks) > 1 else "model runner"
                found[f"{name} of replica {number}" if len(cores) > 1 else name] = told
        return found


def _facts(stats: StepStats) -> dict[str, int]:
    return {
        "requests": stats.num_scheduled,
        "prefills": stats.num_prefills,
        "tokens": stats.num_tokens,
        "prompt_tokens": stats.num_prefill_tokens,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
    }

"""A rank without a model, for tests of `RankProcesses`: the module that they build a rank with.

It obeys its start line. A plan's result echoes the plan: `num_computed` is the number of prompt tokens, `tokens` are
the words of the grammar masks, `timings.forward` is the rank. A "place" is build, size, submit, release, collect,
control or close.
"""

import builtins
import ctypes
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from quire.contracts import errors
from quire.contracts.step import I32, NO_MASKS, StepPlan, StepResult

C_LIBRARY = ctypes.PyDLL(None)  # its functions keep Python's lock


class FakeStart(msgspec.Struct):
    """Instructions for a rank.

    raises    place -> the name of an exception, for `step` (submit, release, collect)
    waits     place -> seconds without Python's lock
    holds     seconds with Python's lock, in submit
    loads     bytes to load, told one by one
    exits     place -> exit code without a word
    depth     steps that are submitted and not collected
    """

    index: int = 0
    step: int = -1
    raises: dict[str, str] = {}
    waits: dict[str, float] = {}
    holds: float = 0.0
    loads: int = 0
    exits: dict[str, int] = {}
    depth: int = 2


class FakeRank:
    """A loaded rank, and a running one."""

    def __init__(self, start: FakeStart) -> None:
        self.start = start
        self.depth = start.depth
        self.running: deque[tuple[StepPlan, I32]] = deque()
        self.log: list[str] = []
        self.payload = msgspec.json.encode({"index": start.index, "bytes": 100 + start.index})

    def size(self, payload: bytes) -> "FakeRank":
        self.go_to("size")
        self.payload = b"sized " + payload
        return self

    def submit(self, plan: StepPlan) -> None:
        self.log.append(f"submit {plan.step}")
        self.go_to("submit", plan.step)
        if self.start.holds:
            C_LIBRARY.usleep(int(1e6 * self.start.holds))
        self.running.append((plan, NO_MASKS))

    def release(self, masks: I32) -> None:
        plan, _ = self.running.pop()
        self.go_to("release", plan.step)
        self.running.append((plan, masks))

    def collect(self) -> StepResult:
        plan, masks = self.running[0]
        self.go_to("collect", plan.step)
        self.running.popleft()
        self.log.append(f"collect {plan.step}")
        computed = sum(len(admission.token_ids) for admission in plan.admitted)
        return StepResult(
            step=plan.step,
            slots=plan.slots,
            tokens=masks,
            num_accepted=np.ones(len(masks), np.int32),
            num_computed=computed,
            moved=self.start.index,
        )

    def control(self, name: str, args: dict[str, Any]) -> object:
        self.go_to("control")
        if name == "log":
            return self.log
        if name == "echo":
            return {"index": self.start.index, **args}
        if name == "variable":
            return os.environ.get(args["name"])
        raise errors.ConfigError(f"unknown control {name!r}: use log, echo or variable.")

    def close(self) -> None:
        self.go_to("close")

    def go_to(self, place: str, step: int = -1) -> None:
        """Obey the instructions for a place."""
        go_to(self.start, place, step)


def go_to(start: FakeStart, place: str, step: int = -1) -> None:
    if step != start.step and start.step >= 0:
        return
    time.sleep(start.waits.get(place, 0.0))
    if place in start.exits:
        os._exit(start.exits[place])
    if (name := start.raises.get(place)) is not None:
        kind = getattr(errors, name, None) or getattr(builtins, name)
        raise kind(f"no luck in {place}")


def build_rank(line: bytes, loading: Callable[[int, int], None]) -> FakeRank:
    start = msgspec.json.decode(line, type=FakeStart)
    for done in range(1, start.loads + 1):
        loading(done, start.loads)
    go_to(start, "build")
    return FakeRank(start)

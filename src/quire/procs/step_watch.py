"""A watch over the steps of a process: when one takes too long, it names the step and where each thread stands.

A thread that computes on a CPU stands in the kernel's file. One that waits for a GPU stands where it waits; the other
ranks tell which collective operation they are in. Knows nothing of models and devices.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

from quire.contracts.step import StepPlan

LOG = logging.getLogger("quire")
HANG_SECONDS = 60.0  # of a rank, and of a core whose server says nothing else
LOOK_SECONDS = 1.0
MOST_FRAMES = 5  # of a thread, the innermost
HOME = Path(__file__).parents[1]
T = TypeVar("T")
Begun = tuple[Callable[[], str], float]  # names a step; when it began


class StepWatch:
    """Steps that have begun and not ended. Any thread may call the methods.

    name      of the process, such as "rank 1"
    seconds   time after which a step is reported, once
    note      called with the time at which a step began that hangs, and with None when it has ended
    """

    def __init__(self, name: str, seconds: float, note: Callable[[float | None], None] = lambda since: None) -> None:
        self._name, self._seconds, self._note = name, seconds, note
        self._lock = threading.Lock()  # no step is noted after its end
        self._steps: deque[Begun] = deque()  # oldest first
        self._told: Begun | None = None

    def begin(self, words: Callable[[], str]) -> None:
        """Note that a step begins. `words` names it if it hangs."""
        self._steps.append((words, time.monotonic()))

    def end(self) -> None:
        """Note that the oldest step has ended."""
        with self._lock:
            if told := self._steps.popleft() is self._told:
                self._note(None)
        if told:
            LOG.warning("%s goes on: the step ended after all.", self._name)

    def run(self, step: Callable[[], T], words: Callable[[], str]) -> T:
        """Run a step, watched."""
        self.begin(words)
        try:
            return step()
        finally:
            self.end()

    def look(self) -> None:
        """Log a report if the oldest step takes too long. Each step is reported once."""
        with self._lock:
            oldest = next(iter(self._steps), None)
            if oldest is None or oldest is self._told or time.monotonic() - oldest[1] < self._seconds:
                return
            self._told = oldest
            self._note(oldest[1])
        stands = "".join(f"\n  {name}: {where}" for name, where in _threads())
        LOG.error("%s hangs: %s has run for %.0f s.%s", self._name, oldest[0](), time.monotonic() - oldest[1], stands)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look once a second, in a thread that ends with the block."""
        done = threading.Event()

        def look_on() -> None:
            while not done.wait(LOOK_SECONDS):
                self.look()

        threading.Thread(target=look_on, name="quire-step-watch", daemon=True).start()
        try:
            yield
        finally:
            done.set()


def plan_words(plan: StepPlan) -> str:
    """Name a step: its number, and what it computes."""
    tokens = int(plan.num_tokens[plan.num_decodes :].sum())
    return f"step {plan.step} ({plan.num_decodes} decodes, {tokens} tokens of prompts)"


def _threads() -> list[tuple[str, str]]:
    """Return name and place in Quire's code of each thread but this one; the main thread first."""
    frames, found = sys._current_frames(), list[tuple[str, str]]()
    for thread in sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread()):
        where = _place(frames.get(thread.ident or 0))
        if where and thread is not threading.current_thread():
            found.append((thread.name, where))
    return found


def _place(frame: FrameType | None) -> str:
    """Return the innermost calls of a thread, the innermost one first: those of Quire, and what the last one calls.
    Returns "" for a thread outside of Quire's code."""
    calls, any_inside = list[str](), False
    while frame is not None and len(calls) < MOST_FRAMES:
        path = Path(frame.f_code.co_filename)
        inside = path.is_relative_to(HOME)
        any_inside |= inside
        if inside or not calls:
            name = path.relative_to(HOME).as_posix() if inside else path.name
            calls.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls) if any_inside else ""

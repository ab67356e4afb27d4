"""Ranks of `fake_rank.py` as processes, and the proof that they leave nothing behind."""

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import Admission, StepPlan
from quire.ranks.executor import RankProcesses
from quire.ranks.launchers import LocalLauncher
from quire.ranks.watch import RankTimes

from . import template_process

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'support'}"}
MODULE = "fake_rank"
HANG_SECONDS = 60
NONE = np.zeros(0, np.int32)


def ranks(*starts: dict[str, Any], leads: tuple[int, ...] = (0,), **times: float) -> RankProcesses:
    """Start a rank for each of `starts`, the fields of its `FakeStart`."""
    lines = [msgspec.json.encode({"index": index, **start}) for index, start in enumerate(starts)]
    names = [f"rank {index} (tp {index})" for index in range(len(starts))]
    return RankProcesses(LocalLauncher(MODULE, ENV), lines, names, leads=leads, times=RankTimes(**times))


@contextmanager
def running(*starts: dict[str, Any], **options: Any) -> Iterator[RankProcesses]:
    """Ranks that are ready for steps."""
    processes = ranks(*starts, **options)
    try:
        processes.build(lambda done, total: None)
        processes.size([b"all"] * len(starts))
        processes.wait_ready()
        yield processes
    finally:
        processes.close()


def plan(step: int, prompt: int = 0, grammar: int = 0) -> StepPlan:
    """Return a plan with a prompt of so many tokens, and so many slots with a grammar."""
    admitted: tuple[Admission, ...] = ()
    if prompt:
        admitted = (
            Admission(
                slot=0,
                request_id="r",
                token_ids=np.arange(prompt, dtype=np.int32),
                block_ids=(NONE,),
                num_computed=0,
                sampler=SamplerSpec(seed=0, num_prompt=prompt),
            ),
        )
    return StepPlan(
        step=step,
        slots=NONE,
        num_decodes=0,
        num_tokens=NONE,
        num_rows=NONE,
        outputs=NONE.astype(np.uint8),
        admitted=admitted,
        grammar=np.arange(grammar, dtype=np.int32),
    )


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that the block leaves no process, no zombie, no thread and no descriptor, and that it ends."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"nothing happened in {HANG_SECONDS} s")

    if not Path("/proc").is_dir():
        pytest.skip("processes and descriptors are counted in /proc")
    gc.collect()
    before = held()
    previous = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_SECONDS)
    try:
        yield
        gc.collect()
        until(lambda: not _new(held(), before), f"{before}, but there is {held()}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def held() -> tuple[list[int], list[str], set[str]]:
    """Return the children of this process, zombies included, its threads and its descriptors.

    Without dummies: Python lists a thread of others once it has run Python code, and drops it at some later time.
    """
    own = {
        entry: os.readlink(f"/proc/self/fd/{entry}")
        for entry in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{entry}")
    }
    return children(os.getpid()), _threads(), set(own)


def _new(now: tuple[list[int], list[str], set[str]], before: tuple[list[int], list[str], set[str]]) -> bool:
    """True if anything is held that was not before. What an earlier test left may end meanwhile."""
    return any(Counter(now[i]) - Counter(before[i]) for i in range(3))


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))


def children(parent: int) -> list[int]:
    """Return the process ids of a process's children, zombies included, without its templates."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                name, _, text = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
            except OSError:
                continue
            if int(text.split()[1]) == parent and template_process.NAME not in name:
                found.append(int(entry))
    return sorted(found)


def state(pid: int) -> str:
    """Return the letter of a process's state; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def exists(pid: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    return state(pid) not in ("", "Z")


def until(condition: Callable[[], bool], what: str, seconds: float = HANG_SECONDS / 2) -> None:
    """Wait for a condition. Raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)

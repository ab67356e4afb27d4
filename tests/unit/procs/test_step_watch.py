"""A watch over steps: a hung one is named once, with the places where the threads stand."""

import threading
import time

import pytest

from quire.procs.step_watch import StepWatch


def test_a_hung_step_is_named_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    hung, noted = threading.Event(), list[float | None]()
    watch = StepWatch("rank 1", 0.0, noted.append)
    began = time.monotonic()
    watch.look()
    thread = threading.Thread(target=watch.run, args=(hung.wait, lambda: "step 7"), name="worker")
    thread.start()
    while not watch._steps:
        pass
    for _ in range(2):
        watch.look()
    (since,) = noted
    assert since is not None and began <= since <= time.monotonic()
    hung.set()
    thread.join()
    assert noted == [since, None]
    hangs, ends = caplog.messages
    assert hangs.startswith("rank 1 hangs: step 7 has run for 0 s.\n") and ends.startswith("rank 1 goes on")
    where = next(line for line in hangs.splitlines() if line.startswith("  worker: "))
    assert where.startswith("  worker: threading.py:") and "< procs/step_watch.py:" in where

"""Restarts of a core: their times, their number, and the processes that a dead one has left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.procs.core_restarts import CALM_SECONDS, FIRST_WAIT, MOST_WAIT, SERVED_SECONDS, CoreRestarts, Offspring


def test_each_restart_waits_longer_up_to_a_cap_and_service_forgives() -> None:
    restarts, now, waits = CoreRestarts(9), 100.0, list[float | None]()
    for seconds in (CALM_SECONDS, *[1.0] * 7, CALM_SECONDS, 1.0):
        restarts.served(now)
        waits.append(restarts.ended(now + seconds))
    assert waits == [*(min(MOST_WAIT, FIRST_WAIT * 2**n) for n in range(8)), FIRST_WAIT, None] and waits[7] == MOST_WAIT
    assert restarts.lost == now + 1.0
    restarts.served(now)
    assert restarts.lost is None and restarts.ended(now + SERVED_SECONDS) == FIRST_WAIT
    assert CoreRestarts(0).ended(now) is None


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
def test_processes_of_a_dead_one_are_found_and_ended() -> None:
    parent = subprocess.Popen(["sh", "-c", "sleep 100 & sleep 100 & echo; wait"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    offspring = Offspring()
    offspring.look(parent.pid)
    parent.kill()
    parent.wait()
    left = offspring.left()
    assert len(left) == 2 and all(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left)
    os.kill(left[0], signal.SIGSTOP)
    while " T " not in Path(f"/proc/{left[0]}/stat").read_text():
        time.sleep(0.001)
    offspring.kill()
    for _ in range(1000):
        if not offspring.left():
            return
        time.sleep(0.01)
    os.kill(left[0], signal.SIGKILL)
    pytest.fail("a stopped process lives on")

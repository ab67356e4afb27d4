"""Facts about processes, and the lag of an event loop that something keeps."""

import asyncio
import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from quire.observe import process
from quire.observe.process import age, resident_bytes, watch_event_loop


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_process_has_memory() -> None:
    held = resident_bytes(os.getpid())
    assert held is not None and held > 1_000_000


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_the_age_of_this_process() -> None:
    began, young = time.monotonic(), age()
    while time.monotonic() - began < 0.05:
        pass
    old = age()
    assert young is not None and old is not None and young + 0.03 < old < young + 60
    shown = "from quire.observe.process import age; print(age())"
    source = Path(__file__).resolve().parents[3] / "src"
    child = subprocess.run([sys.executable, "-c", shown], cwd=source, capture_output=True, text=True, check=True)
    assert 0 <= float(child.stdout) < (age() or 0)


def test_a_process_that_is_gone_has_no_usage() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) is None


def test_objects_that_refer_to_each_other_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connection:
        pass

    async def work() -> None:
        collecting, connection = asyncio.create_task(process.collect_garbage()), Connection()
        connection.parser = connection  # type: ignore[attr-defined]
        gc.collect(1)  # it is older than the youngest
        left = weakref.ref(connection)
        del connection
        while left() is not None:
            await asyncio.sleep(0.001)
        collecting.cancel()

    monkeypatch.setattr(process, "GARBAGE_SECONDS", 0.0)
    asyncio.run(asyncio.wait_for(work(), 60.0))


def test_a_loop_that_is_kept_is_noticed() -> None:
    lags: list[float] = []

    async def run() -> None:
        watcher = asyncio.create_task(watch_event_loop(lags.append, 0.01))
        await asyncio.sleep(0.02)
        time.sleep(0.1)
        await asyncio.sleep(0.02)
        watcher.cancel()

    asyncio.run(run())
    assert max(lags) > 0.08 and min(lags) >= 0

"""Threads for long texts: clients use them in turn, and too much that waits is refused."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.contracts.errors import QueueFull
from quire.entry.http import text_work
from quire.entry.http.text_work import FairThreads


class Works:
    """Works that a test ends one by one. `begun`: names in the order in which they began."""

    def __init__(self, threads: int, each: int) -> None:
        self.fair = FairThreads("test", threads, each)
        self.begun: list[str] = []
        self.ends: dict[str, threading.Event] = {}

    def start(self, name: str, size: int = 1) -> "asyncio.Task[str]":
        end = self.ends[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert end.wait(20)
            return name

        return asyncio.create_task(self.fair.run(name[0], size, work))

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(20):
            while sorted(self.begun) != sorted(names):
                await asyncio.sleep(0.001)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_client_of_many_texts_holds_up_no_other() -> None:
    async def work() -> None:
        works = Works(2, 1)
        tasks = [works.start(name) for name in ("a1", "a2", "a3", "b1")]
        await works.until("a1", "b1")
        tasks += [works.start("c1"), works.start("b2")]
        works.ends["a1"].set()
        await works.until("a1", "b1", "a2")  # the first in turn that has no text of its own running
        works.ends["a2"].set()
        await works.until("a1", "b1", "a2", "c1")  # a3 waits behind the others
        for end in works.ends.values():
            end.set()
        assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "b1", "c1", "b2"]

    run(work())


def test_what_waits_is_bounded_for_a_client_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_work, "MOST_WAITING", 100)

    async def work() -> None:
        works = Works(1, 1)
        tasks = [works.start("a1", 1000), works.start("a2", 50)]
        await works.until("a1")
        for name, size in (("a3", 1), ("b1", 51)):
            with pytest.raises(QueueFull, match="too many long texts"):
                await works.start(name, size)
        tasks.append(works.start("b2", 50))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await works.start("c1", 1)
        for end in works.ends.values():
            end.set()
        assert await asyncio.gather(*tasks) == ["a1", "a2", "b2"]
        late = works.start("a4", 50)
        works.ends["a4"].set()
        assert await late == "a4"

    run(work())


def test_a_client_that_leaves_gives_its_turn_back() -> None:
    async def work() -> None:
        works = Works(1, 1)
        tasks = [works.start(name) for name in ("a1", "b1", "c1")]
        await works.until("a1")
        tasks[1].cancel()
        tasks[0].cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert works.begun == ["a1"]  # its work goes on, and counts
        works.ends["a1"].set()
        works.ends["c1"].set()
        assert await tasks[2] == "c1" and works.begun == ["a1", "c1"]

    run(work())


def test_a_failure_reaches_the_caller_alone() -> None:
    async def work() -> None:
        fair = FairThreads("test", 1, 1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await fair.run("a", 1, lambda: 1 // 0)
        assert await fair.run("a", 1, lambda: 3) == 3

    run(work())

"""A core that dies and is started again: who waits, who gets an error, what is counted, and when it is enough."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.serve import ServerConfig
from quire.contracts.errors import EngineDead, EngineStarting
from quire.entry.core_process import build
from quire.entry.http.engine import ServedEngine
from quire.entry.http.life.state import EngineState
from quire.entry.http.readiness import readiness
from quire.observe.metrics import Metrics
from quire.procs import core_client, core_restarts

from ....support.core_thread import CoreThread
from .test_engine import PATIENCE, expected, open_one, read, run, token_ids


class Restarted:
    """A server's engine whose cores are threads; `ends` counts the files of its folder after each loss."""

    def __init__(self, **options: Any) -> None:
        config = ServerConfig.from_flat(device="mock", mock_step_ms=2.0, max_num_seqs=2, **options)
        self.cores: list[CoreThread] = []
        self.metrics = Metrics()
        self.engine = ServedEngine(config, metrics=self.metrics, launch=self._launch)

    def _launch(self, start: Any) -> CoreThread:
        self.cores.append(CoreThread(start, build))
        return self.cores[-1]

    async def __aenter__(self) -> "Restarted":
        await self.engine.start(lambda loading: None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.close()

    def end_core(self) -> None:
        """Let the next step of the core fail."""

        def lost() -> Any:
            raise OSError("device lost")

        assert self.cores[-1].core is not None
        self.cores[-1].core.executor.collect = lost  # type: ignore[method-assign]

    async def until(self, state: EngineState) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.engine.state is not state:
                await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait less than a server does."""
    monkeypatch.setattr(core_client, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(core_client, "LAST_WORDS_SECONDS", 0.0)
    monkeypatch.setattr(core_restarts, "FIRST_WAIT", 0.02)
    yield


def test_requests_without_a_token_wait_for_the_next_core_and_others_fail_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "quire")

    async def work() -> None:
        async with Restarted(restart=2) as server:
            engine = server.engine
            begun = [open_one(engine, 4000, [i, 1]) for i in range(2)]
            for stream in begun:
                await stream.__anext__()
            waiting = [asyncio.create_task(read(open_one(engine, 8, [i, 2]))) for i in range(3)]
            gone = open_one(engine, 8, [9, 2])
            server.end_core()
            for stream in begun:
                with pytest.raises(EngineDead, match="device lost.* It is started again: send"):
                    await read(stream)
            assert engine.state is EngineState.RESTARTING and not any(task.done() for task in waiting)
            now = readiness(engine, 1.0)
            assert (now.status, now.alive, now.ready) == ("restarting", False, False)
            assert "device lost. It is started again (" in now.reason
            for refused in (lambda: open_one(engine), lambda: open_one(engine, 1, [1] * 9)):
                with pytest.raises(EngineStarting, match=r"device lost\. It is started again: try"):
                    refused()
            with pytest.raises(EngineStarting):
                await engine.control("plan")
            line = server.metrics.snapshot()
            assert (line.num_running, line.num_waiting, line.kv_usage) == (0, 4, 0.0), "the front end holds 4 requests"
            gone.close()  # its client does not wait
            for index, answer in enumerate(await asyncio.gather(*waiting)):
                assert token_ids(answer[0]) == expected(engine, [index, 2], 8)
            await engine.wait_idle()
            assert await engine.control("check") is True and not engine._unsent._held
            assert server.metrics.restarts.counts == {("core", "failed"): 1}
            assert sum(server.metrics._seen["restart_seconds"].counts) == 1
            left = sorted(os.listdir(engine.place.folder))
            assert left == ["alive", "from_1", "to_1"], "sockets of the dead core are left"
            assert re.search(r"The engine serves again after \d+\.\d s; 1 of 2 restarts are left\.", caplog.text)

    run(work())


def test_a_request_that_ends_every_core_gets_one_further_try_and_a_loop_ends_the_server() -> None:
    async def work() -> None:
        async with Restarted(restart=2) as server:
            told = asyncio.create_task(server.engine.closed())
            server.end_core()
            fatal = asyncio.create_task(read(open_one(server.engine, 8)))
            for turn in (1, 2):
                while len(server.cores) <= turn or server.cores[turn].core is None:
                    await asyncio.sleep(0)
                assert fatal.done() == (turn == 2), "it goes to every core"
                server.end_core()
            with pytest.raises(EngineDead, match="device lost"):
                await fatal
            await server.until(EngineState.READY)
            last = open_one(server.engine, 8)
            cause = str(await told)
            with pytest.raises(EngineDead):
                await read(last)
            assert "device lost" in cause and "It was started again 2 times (--restart)" in cause
            assert server.engine.state is EngineState.DEAD and len(server.cores) == 3

    run(work())


@pytest.mark.parametrize("fault", [OSError(12, "Cannot allocate memory"), ZeroDivisionError()])
def test_a_core_that_cannot_be_started_again_ends_the_server(fault: Exception) -> None:
    async def work() -> None:
        async with Restarted(restart=2) as server:

            def refuse(start: Any) -> Any:
                server.cores.append(server.cores[0])
                raise fault

            server.engine._client._launch = refuse
            server.end_core()
            waiting = asyncio.create_task(read(open_one(server.engine, 8)))
            cause = str(await asyncio.wait_for(server.engine.closed(), PATIENCE))
            assert ("Cannot allocate memory" in cause) == isinstance(fault, OSError) == (len(server.cores) == 3), cause
            with pytest.raises(EngineDead):
                await waiting

    run(work())


@pytest.mark.parametrize("asleep", [False, True])
def test_a_signal_during_a_restart_ends_all_that_waits(asleep: bool) -> None:
    async def work() -> None:
        async with Restarted(restart=2) as server:
            engine = server.engine
            core_restarts.note_sleep(engine.place.folder, asleep=asleep)
            server.end_core()
            waiting = asyncio.create_task(read(open_one(engine, 8)))
            await server.until(EngineState.RESTARTING)
            if asleep:
                await asyncio.sleep(0.1)
                assert len(server.cores) == 1, "the core came back before /wake_up"
            engine.drain()
            await asyncio.wait_for(engine.wait_idle(), PATIENCE)
            results = await asyncio.gather(waiting, return_exceptions=True)
            assert "shutting down" in str(results[0])
        assert not Path(engine.place.folder).exists()

    run(work())

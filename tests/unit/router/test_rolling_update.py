"""deploy/rolling_update.py against a router: one backend after the other, and none that has requests."""

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest

from quire.config.serve import HttpConfig
from quire.entry.http.access.front import operated
from quire.entry.http.listener import HttpListener
from quire.entry.http.sockets import listen

from ...support.mock_backends import mock_backends, operate, routed

SCRIPT = Path(__file__).parents[3] / "deploy" / "rolling_update.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with short waits."""
    spec = importlib.util.spec_from_file_location("rolling_update", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    return module


def test_backends_restart_one_after_the_other(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends) as (router, url), aiohttp.ClientSession() as session:
            socket = listen(HttpConfig(port=0))
            operators = HttpListener(operated(router.operate, "127.0.0.1"), HttpConfig(), socket, router.refused)
            operators.start()
            one, two = backends

            async def update(command: str, *more: str) -> int:
                where = f"http://127.0.0.1:{socket.getsockname()[1]}"
                return await asyncio.to_thread(script.main, ["--router", where, "--restart", command, *more])

            async def states() -> list[tuple[bool, bool]]:
                return [(found["up"], found["draining"]) for found in (await operate(router, "/backends"))["backends"]]

            async def answered() -> str:
                async with session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                    return await answer.text()

            one.step = asyncio.Semaphore(1)
            streams = asyncio.create_task(answered())
            while not router.backends[0].in_flight:
                await asyncio.sleep(0.001)
            updates = asyncio.create_task(update(f"touch {tmp_path}/{{port}}"))
            while not router.backends[0].draining:
                await asyncio.sleep(0.001)
            assert '"by": "b1"' in await answered() and not [*tmp_path.iterdir()], "a request runs there"
            for _ in range(4):
                one.step.release()
            assert "[DONE]" in await streams and await updates == 0
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                b.url.rpartition(":")[2] for b in backends
            )
            assert await states() == [(True, False)] * 2

            one.health = 503  # it does not come up again
            assert await update("true", one.url) == 1 and await states() == [(False, False), (True, False)]
            one.health = 200
            assert await update("false") == 1 and await states() == [(True, True), (True, False)]
            assert await update("true") == 1 and await states() == [(True, True), (True, False)]
            out, err = capsys.readouterr()
            said = err.splitlines()
            assert "does not reach" in said[0] and "ended with 1" in said[1] and "no other backend" in said[2]
            assert "/backends/resume" in said[1] and f"drained: {one.url}" in said[2]
            assert f"left out, because drained: {one.url}" in out
            assert await asyncio.to_thread(script.main, ["--router", url, "--restart", "true"]) == 1
            assert "--admin-port" in capsys.readouterr().err
            assert await update("true", one.url, two.url) == 0 and await states() == [(True, False)] * 2
            await operators.stop(0.5)

    asyncio.run(asyncio.wait_for(work(), 60))

"""The core in a process of its own: it serves, its death in any form is told, and nothing of it stays behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM
from quire.config.bundled import bundled_model
from quire.config.serve import ServerConfig
from quire.contracts.errors import ConfigError, EngineDead, WeightsError
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.entry.http.engine import CORE_MODULE, ServedEngine
from quire.entry.http.life.state import EngineState
from quire.entry.prompts import Prompt
from quire.observe.metrics import Metrics

from ..support.mock_tokens import mock_tokens
from ..support.template_process import SWITCH

PATIENCE = 120.0
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


@pytest.fixture(autouse=True)
def sockets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Folder of the sockets' folders; empty after every test. Short: a socket's path may not be long."""
    folder = Path(tempfile.mkdtemp(prefix="q"))
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    left = [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]  # PyTorch's own
    assert left == [], "a folder of sockets was left behind"
    shutil.rmtree(folder)


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, PATIENCE)

    asyncio.run(main())


def is_running(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


async def started(**options: Any) -> ServedEngine:
    engine = ServedEngine(ServerConfig.from_flat(**({"device": "mock"} | options)), metrics=Metrics())
    await engine.start(lambda loading: None)
    return engine


def pid_of(engine: ServedEngine) -> int:
    core = engine._client.core
    assert core is not None and core.pid is not None
    return core.pid


async def ask(engine: ServedEngine, prompt: list[int], tokens: int, **fields: Any) -> list[int]:
    params = SamplingParams(
        **(
            {"temperature": 0.0, "seed": 0, "max_tokens": tokens, "ignore_eos": True, "output_kind": OutputKind.DELTA}
            | fields
        )
    )
    stream = engine.open([Prompt(token_ids=prompt)], params, request_id=f"r{prompt[0]}")
    try:
        return [token async for changed in stream for _, o in changed for token in o.outputs[0].token_ids]
    finally:
        stream.close()


def test_it_serves_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no copy of a process that has imported torch: a core of the mock never does."""
    monkeypatch.setenv(SWITCH, "0")

    async def work() -> None:
        loadings: list[str] = []
        engine = ServedEngine(ServerConfig.from_flat(device="mock", async_depth=2), metrics=Metrics())
        ready = await engine.start(lambda loading: loadings.append(loading.phase))
        assert ready.device == "mock" and "starting" in loadings
        pid = pid_of(engine)
        if Path("/proc").is_dir():
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        for number in (signal.SIGINT, signal.SIGTERM):  # the server's to handle: it drains, then says stop
            os.kill(pid, number)
        answers = await asyncio.gather(*(ask(engine, [i + 1, 2, 3], 30) for i in range(20)))
        assert answers == [mock_tokens([i + 1, 2, 3], 0, 30, ready.vocab_size) for i in range(20)]
        assert await engine.control("check") is True
        await engine.close()
        assert not is_running(pid)

    run(work())


def test_the_bundled_model_answers_as_it_does_in_this_process(talker_options: dict[str, Any]) -> None:
    prompt = "The little dog went to the"
    with LLM(**talker_options, max_num_seqs=4) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12)
        (expected,) = llm.generate([prompt], greedy, use_tqdm=False)

    async def work() -> None:
        loadings: list[tuple[str, int, int]] = []
        config = ServerConfig.from_flat(**talker_options, max_num_seqs=4)
        engine = ServedEngine(config, metrics=Metrics())
        ready = await engine.start(lambda loading: loadings.append((loading.phase, loading.done, loading.total)))
        weights = [(done, total) for phase, done, total in loadings if phase == "weights"]
        assert weights and weights[-1][0] == weights[-1][1] > 0 and weights == sorted(weights)
        assert ready.weight_bytes > 0 and ready.kv_bytes > 0 and ready.plans.keys() >= {"dtype", "attention"}
        assert engine.front is not None
        tokens = await ask(engine, engine.front.encode(Prompt(text=prompt)), 12, ignore_eos=False)
        assert tokens == expected.outputs[0].token_ids
        await engine.close()

    run(work())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_its_death_is_told_to_everybody(number: signal.Signals) -> None:
    async def work() -> None:
        engine = await started(mock_step_ms=5.0)
        pid, told = pid_of(engine), asyncio.create_task(engine.closed())
        tasks = [asyncio.create_task(ask(engine, [i + 1], 4000)) for i in range(20)]
        await asyncio.sleep(0.1)
        os.kill(pid, number)
        began = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        print(f"{number.name}: told after {time.monotonic() - began:.2f} s")
        assert {type(result) for result in results} == {EngineDead}
        word = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "stopped by a signal"}[number]
        assert word in str(await told) and engine.state is EngineState.DEAD
        await engine.close()
        await until(lambda: not is_running(pid))

    run(work())


def test_a_moment_s_stop_is_no_death() -> None:
    async def work() -> None:
        engine = await started(mock_step_ms=5.0)
        task = asyncio.create_task(ask(engine, [1], 100))
        await asyncio.sleep(0.1)
        os.kill(pid_of(engine), signal.SIGSTOP)
        await asyncio.sleep(0.4)
        os.kill(pid_of(engine), signal.SIGCONT)
        assert len(await task) == 100
        await engine.close()

    run(work())


def test_it_does_not_outlive_its_parent(sockets_folder: Path) -> None:
    program = f"""
import asyncio, sys, tempfile, time
tempfile.tempdir = {str(sockets_folder)!r}
from quire.config.serve import ServerConfig
from quire.entry.http.engine import ServedEngine
from quire.observe.metrics import Metrics
async def main():
    engine = ServedEngine(ServerConfig.from_flat(device="mock"), metrics=Metrics())
    await engine.start(lambda loading: None)
    print(engine._client.core.pid, "torch" in sys.modules, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, has_torch = parent.stdout.readline().split()
        assert has_torch == "False"
        assert len(list(sockets_folder.iterdir())) == 1
        parent.kill()
    deadline = time.monotonic() + PATIENCE
    while (is_running(int(pid)) or list(sockets_folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid))


def test_what_keeps_it_from_starting_is_raised_as_what_it_is(tmp_path: Path) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(bundled_model(), damaged)
    for file in damaged.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1000])

    async def work() -> None:
        with pytest.raises(WeightsError, match="safetensors"):
            await started(model=str(damaged), device="cpu", num_threads=1)
        with pytest.raises(ConfigError, match="max_model_len"):
            await started(max_model_len=10**7)

    run(work())


def test_a_core_that_cannot_even_begin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.entry.http.engine.CORE_MODULE", "quire.no_such_module")

    async def work() -> None:
        with pytest.raises(EngineDead, match="exited with code 1"):
            await started()

    run(work())


def test_by_hand_it_says_what_it_is_for() -> None:
    done = subprocess.run([sys.executable, "-m", CORE_MODULE], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1 and "quire serve" in done.stderr and "Traceback" not in done.stderr


def test_the_offline_classes_have_no_mock() -> None:
    with pytest.raises(ConfigError, match="quire serve"):
        LLM(device="mock")
    with pytest.raises(ConfigError, match="quire serve"):
        AsyncLLM(device="mock")

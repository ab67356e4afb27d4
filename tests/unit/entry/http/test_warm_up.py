"""Requests that are answered before the server is ready: their order in its life, what they leave, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.serve import ServerConfig
from quire.contracts.errors import ConfigError
from quire.entry.core_process import build
from quire.entry.http.app import make_context
from quire.entry.http.engine import ServedEngine
from quire.entry.http.life.state import EngineState
from quire.entry.http.life.warm_up import APART, WarmUp
from quire.observe.metrics import Metrics
from quire.procs.messages import Loading

from ....support.core_thread import CoreThread
from .test_engine import open_one, read, run

PROMPT = list(range(7, 47))  # two blocks of 16, and more
GOOD = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}}


def config_of(folder: Path, *lines: object, **options: Any) -> ServerConfig:
    file = folder / "warm.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return ServerConfig.from_flat(device="mock", block_size=16, warmup_requests=str(file), **options)


async def started(config: ServerConfig, seen: list[Any]) -> ServedEngine:
    """Start an engine with its requests. `seen` gets what the operator sees, and the state at each progress."""
    metrics = Metrics()
    engine = ServedEngine(config, metrics=metrics, launch=lambda start: CoreThread(start, build))
    engine.warm_up = WarmUp(make_context(engine, config, metrics), seen.append).run

    def loading(message: Loading) -> None:
        if message.phase == "warm-up":
            seen.append((message.done, message.total, engine.state))

    await engine.start(loading)
    return engine


def test_requests_are_answered_before_the_server_is_ready_and_fill_the_cache(tmp_path: Path) -> None:
    async def work() -> None:
        seen: list[Any] = []
        engine = await started(config_of(tmp_path, GOOD, "", GOOD | {"custom_id": "b"}), seen)
        assert seen[:-1] == [(done, 2, EngineState.STARTING) for done in range(3)]
        assert seen[-1].startswith("warm-up: 2 requests in ") and "80 prompt tokens, 6 generated; 2 KV" in seen[-1]
        assert engine.state is EngineState.READY
        stream = open_one(engine, 1, PROMPT)
        await read(stream)
        assert stream.generations[0].num_cached == 32
        await engine.close()

    run(work())


def test_a_request_that_fails_refuses_the_start(tmp_path: Path) -> None:
    async def work() -> None:
        bad = GOOD | {"custom_id": "b", "body": {"prompt": "a", "max_tokens": -4}}
        with pytest.raises(ConfigError, match=r"warm.jsonl, line 2: max_tokens must be"):
            await started(config_of(tmp_path, GOOD, bad), [])

    run(work())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([GOOD, "{"], "line 2: the line is not a request"),
        ([GOOD | {"url": "/v1/rerank"}], "line 1: url must be one of /v1/completions, "),
        ([""], "has no requests"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_anything_is_loaded(
    tmp_path: Path, lines: list[object], words: str
) -> None:
    config = config_of(tmp_path, *lines)
    engine = ServedEngine(config, metrics=Metrics())
    with pytest.raises(ConfigError, match=words):
        WarmUp(make_context(engine, config, Metrics()), print)
    with pytest.raises(ConfigError, match="warmup_requests needs one HTTP process"):
        config_of(tmp_path, GOOD, api_server_count=2)


def test_keys_that_find_none_of_the_prefixes_are_told(tmp_path: Path) -> None:
    async def work() -> None:
        seen: list[Any] = []
        engine = await started(config_of(tmp_path, GOOD, api_key=("sk-a", "sk-b")), seen)
        assert seen[-1].endswith(APART)
        await engine.close()

    run(work())

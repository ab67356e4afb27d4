"""Hundreds of requests that come and go in every way: nothing of them may stay, in either process.

400 requests; 10,000 with QUIRE_FULL=1. The growth of memory is printed, not judged (`pytest -s`): allocators keep
what they like.
"""

import asyncio
import gc
import os
import random
import threading
from pathlib import Path

import pytest

from quire.config.serve import ServerConfig
from quire.contracts.errors import QueueFull, QueueTimeout, RequestFailed
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.entry.http.engine import ServedEngine
from quire.entry.prompts import Prompt
from quire.observe.metrics import Metrics
from quire.observe.process import resident_bytes

AT_ONCE = 100
PATIENCE = 600.0


async def one_request(engine: ServedEngine, rng: random.Random, number: int, ends: dict[str, int]) -> None:
    """Send a request with a life of its own: read to the end, left after a few tokens, cancelled, or out of time."""
    shared = list(range(1, 1 + rng.randrange(0, 120)))
    prompts = [Prompt(token_ids=[*shared, 200 + number % 50, i + 1]) for i in range(rng.choice((1, 1, 1, 3)))]
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2)),
        max_tokens=rng.randrange(1, 60),
        temperature=1.0,
        seed=number,
        stop=rng.choice((None, None, ["e", " t"])),
        logprobs=rng.choice((None, None, 2)),
        output_kind=rng.choice((OutputKind.DELTA, OutputKind.FINAL_ONLY)),
    )
    timeout = rng.choice((None, None, None, rng.random() / 20))
    try:
        stream = engine.open(prompts, params, request_id=str(number), timeout=timeout)
    except QueueFull:
        ends["refused"] = ends.get("refused", 0) + 1
        return
    leave_after = rng.choice((None, None, 0, 1, 3))
    end = "read"
    try:
        if leave_after == 0:
            await asyncio.sleep(rng.random() / 100)
            end = "left"
            return
        reads = 0
        async for _ in stream:
            reads += 1
            if reads == leave_after:
                end = "left"
                return
    except QueueTimeout:  # its time ended before its start
        end = "deadline"
    except RequestFailed as error:
        end = error.code
    except asyncio.CancelledError:
        end = "cancelled"
        raise
    finally:
        stream.close()
        ends[end] = ends.get(end, 0) + 1


async def soak(engine: ServedEngine, rng: random.Random, count: int, ends: dict[str, int]) -> None:
    """`count` requests, about AT_ONCE at a time; some are cancelled from outside."""
    running: set[asyncio.Task[None]] = set()
    for number in range(count):
        running.add(asyncio.create_task(one_request(engine, rng, number, ends)))
        if rng.random() < 0.05:
            rng.choice(sorted(running, key=lambda task: task.get_name())).cancel()
        while len(running) >= AT_ONCE:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    if running:
        await asyncio.wait(running)


def descriptors() -> int | None:
    return len(os.listdir("/proc/self/fd")) if Path("/proc").is_dir() else None


def test_nothing_is_left_of_many_requests(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2] / "src"))
    count, rounds = (10_000, 5) if full else (400, 2)
    rng, ends, memory = random.Random(7), dict[str, int](), list[tuple[int, int]]()
    # Few blocks, few slots and little room in the queue: requests are preempted, wait, and are refused.
    options = dict(
        device="mock",
        max_model_len=256,
        num_gpu_blocks_override=150,
        block_size=8,
        max_num_seqs=24,
        max_num_batched_tokens=256,
        max_waiting=150,
        async_depth=2,
    )

    async def main() -> None:
        engine = ServedEngine(ServerConfig.from_flat(**options), metrics=Metrics("quire", "mock"))
        await engine.start(lambda loading: None)
        core = engine._client.core
        assert core is not None and core.pid is not None
        await soak(engine, rng, 100, {})  # whatever is made once has been made
        tasks, threads, fds = len(asyncio.all_tasks()), threading.active_count(), descriptors()
        for _ in range(rounds):
            await soak(engine, rng, count // rounds, ends)
            await engine.wait_idle()
            assert await engine.control("check") is True  # all blocks and slots of the core are free
            gc.collect()
            usages = [resident_bytes(pid) for pid in (os.getpid(), core.pid)]
            memory.append(tuple(used or 0 for used in usages))  # type: ignore[arg-type]
        assert engine.front is not None and len(engine.front) == 0 and engine.num_live == 0
        assert not any(engine._deadlines._lines.values()) and not engine._live and not engine._operations._replies
        assert (len(asyncio.all_tasks()), threading.active_count()) == (tasks, threads)
        assert descriptors() == fds
        await engine.close()

    before = descriptors()
    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    gc.collect()
    if before is not None:
        assert (descriptors() or 0) <= before
    assert {"read", "left", "cancelled", "deadline", "refused"} <= ends.keys(), ends
    first, last, between = memory[0], memory[-1], count * (rounds - 1) // rounds
    slopes = [(b - a) / between for a, b in zip(first, last, strict=True)]
    print(f"{count} requests {ends}; bytes per request: server {slopes[0]:.0f}, core {slopes[1]:.0f}")

"""Metrics of several HTTP processes: any of them shows those of all, also of a process that has ended."""

import asyncio
from pathlib import Path

import pytest

from quire.contracts.adapters import AdapterStats
from quire.contracts.output import PrefixStats, StepStats
from quire.contracts.sampling import SamplingParams
from quire.observe.shared import SharedMetrics

ADAPTERS = AdapterStats(slots=2, resident={"sql": 1}, loads=5, reads=3)
STATE = {"num_running": 3, "num_blocks": 10, "num_free_blocks": 4, "prefix": PrefixStats(queries=50, hits=20)}


def made(count: int = 3) -> list[SharedMetrics]:
    return [SharedMetrics("quire", "m", number=number, count=count) for number in range(count)]


def samples(metrics: SharedMetrics) -> dict[str, float]:
    lines = metrics.render()[0].decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def play(every: list[SharedMetrics]) -> None:
    """A step with a token for the request of each process; only the first counts the step."""
    for number, metrics in enumerate(every):
        metrics.engine_ready(num_slots=8, num_blocks=10, block_size=16, max_model_len=64)
        metrics.request_started(SamplingParams(max_tokens=4))
        metrics.step(
            StepStats(**STATE, step=-1 if number else 0, num_tokens=18, num_prefill_tokens=15, execute_s=0.1),
            1 if number else len(every),
            ADAPTERS,
        )
        metrics.tokens(1)
        metrics.http("/v1/completions", 200)
        metrics.aborted("disconnect")
        metrics.request_finished(
            "stop", num_prompt=5, num_outputs=[1], queue_s=0.1, prefill_s=0.1, decode_s=0.1, e2e_s=2.0
        )


async def shared(every: list[SharedMetrics], folder: Path) -> None:
    tasks = [asyncio.create_task(metrics.share(folder)) for metrics in every]
    await asyncio.sleep(0)
    play(every)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_no_counter_falls_where_another_process_is_asked_next(tmp_path: Path) -> None:
    async def work() -> tuple[float, float]:
        every = made(2)
        tasks = [asyncio.create_task(metrics.share(tmp_path)) for metrics in every]
        await asyncio.sleep(0)
        every[0].http("/v1/completions", 200)  # after the last write of its file
        shown = [sum(v for n, v in samples(m).items() if "http_requests_total" in n) for m in every]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return shown[0], shown[1]

    first, second = asyncio.run(work())
    assert second >= first == 1


def test_any_process_shows_the_counts_of_all(tmp_path: Path) -> None:
    every = made()
    asyncio.run(shared(every, tmp_path))
    one = SharedMetrics("quire", "m")
    play([one])
    alone, whole = samples(one), [samples(metrics) for metrics in every]
    for found in whole[1:]:
        assert {name for name, value in found.items() if value != whole[0][name]} <= {
            name for name in found if "last_step_age" in name or "resident" in name
        }
    for name, factor in (
        ("request_success_total", 3),
        ("http_requests_total", 3),
        ("generation_tokens_total", 3),
        ("request_prompt_tokens_count", 3),
        ("e2e_request_latency_seconds_sum", 3),
        ("steps_total", 1),
        ("delivered_tokens_total", 3),
        ("num_requests_running{", 1),
        ("adapter_requests{", 1),
        ("adapter_loads_total", 1),
        ("kv_cache_usage_perc", 1),
        ("step_time_seconds_count", 1),
        ("prefix_cache_hits_total", 1),
        ("step_tokens_total", 1),
    ):
        keys = [key for key in alone if key.startswith(f"quire:{name}")]
        assert keys and [whole[0][key] for key in keys] == [factor * alone[key] for key in keys], name
    roles = [key for key in whole[0] if "resident" in key]
    assert [any(f'"{role}"' in key for key in roles) for role in ("http", "http_1", "http_2")] == [True] * 3


def test_requests_that_wait_for_the_next_core_are_those_of_all_processes(tmp_path: Path) -> None:
    every = made()
    asyncio.run(shared(every, tmp_path))
    for number, metrics in enumerate(every):
        metrics.engine_lost(lambda number=number: number + 1)
        metrics._publish(tmp_path)
    again = SharedMetrics("quire", "m", number=2, count=3, again=1)  # one that was killed holds nothing
    again._publish(tmp_path)
    name = 'quire:num_requests_waiting{engine="0",model_name="m"}'
    assert samples(every[0])[name] == 1 + 2 == every[0].snapshot().num_waiting


def test_counts_are_written_again_after_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for example. One line tells it, whatever the number of faults."""
    monkeypatch.setattr("quire.observe.shared.INTERVAL", 0.0)
    (blocked := tmp_path / "counts1.new").mkdir()

    async def life() -> None:
        task = asyncio.create_task(made()[1].share(tmp_path))
        for _ in range(5):
            await asyncio.sleep(0)
        blocked.rmdir()
        while not (tmp_path / "counts1").exists():
            assert not task.done(), "nothing is written any more"
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(life())
    (line,) = caplog.messages
    assert line.startswith(f"the counts of HTTP process 1 for /metrics could not be written to {tmp_path}: Is a dir")


def test_the_next_process_goes_on_with_the_counts_of_those_before(tmp_path: Path) -> None:
    """However often a process dies, there is one file of its number, and a scrape reads no more."""

    async def ended_early() -> None:
        loading = asyncio.create_task(next_one(3).share(tmp_path))
        await asyncio.sleep(0)
        loading.cancel()

    def next_one(again: int) -> SharedMetrics:
        return SharedMetrics("quire", "m", number=1, count=2, again=again)

    first, second = made(2)
    for metrics in (second, next_one(1), next_one(2), first):
        asyncio.run(shared([metrics], tmp_path))
    asyncio.run(ended_early())
    found = samples(first)
    assert {path.name for path in tmp_path.iterdir()} == {"counts0", "counts1"}
    for name in ("http_requests_total", "request_prompt_tokens_count", "steps_total", "step_tokens_total"):
        values = [value for key, value in found.items() if key.startswith(f"quire:{name}") and value]
        assert values and all(value % 4 == 0 for value in values), (name, values)


def test_a_scrape_does_not_change_the_counts(tmp_path: Path) -> None:
    every = made(2)
    asyncio.run(shared(every, tmp_path))
    name = 'quire:http_requests_total{engine="0",method="POST",model_name="m",route="/v1/completions",status="200"}'
    assert [samples(every[0])[name] for _ in range(3)] == [2.0] * 3


def test_a_process_that_is_not_ready_adds_nothing(tmp_path: Path) -> None:
    """Its histograms of lengths have other buckets until it knows the context length."""
    first, second = made(2)
    second._publish(tmp_path)
    asyncio.run(shared([first], tmp_path))
    assert samples(first)['quire:steps_total{engine="0",model_name="m"}'] == 1.0

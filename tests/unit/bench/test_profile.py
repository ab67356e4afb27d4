"""Evaluation of a trace: times by kernel, pauses, and steps. No GPU: the events are made up."""

import random

import pytest

from quire.bench.profile import LAST_OF_STEP, Event, where_time_goes
from quire.entry.cli.bench import _profile_table
from quire.entry.cli.main import main
from quire.entry.exit_codes import REFUSED


def step(start: int, kernels: int, *, pause: int, prefix: str = "") -> tuple[list[Event], int]:
    """A copy, kernels of 2 us with `pause` ns between them, a last one of 1 us, a copy; and its end."""
    events = [Event("Memcpy HtoD (Pinned -> Device)", start, 500)]
    at = start + 500
    for i in range(kernels):
        at += pause
        events.append(Event(f"{prefix}kernel_{i}", at, 2000))
        at += 2000
    events.append(Event(LAST_OF_STEP, at, 1000))
    events.append(Event("Memcpy DtoH (Device -> Pinned)", at + 1100, 400))
    return events, at + 1500


def decode(pauses: list[int]) -> list[Event]:
    """A prompt of ten kernels, then a step of four for each pause that follows its predecessor."""
    events, at = step(0, 10, pause=0, prefix="prompt_")
    for pause in pauses:
        more, at = step(at + pause, 4, pause=100)
        events += more
    return events


def test_times_by_kernel_and_pauses() -> None:
    events = decode([3000, 5000])
    random.Random(0).shuffle(events)
    found = where_time_goes(events)
    span = 22_000 + 3000 + 5000 + 2 * (500 + 4 * 2100 + 1000 + 500)
    assert found["idle"] == {
        "total_ms": round((3 * 100 + 8000 + 2 * 400) / 1e6, 3),
        "share": round((3 * 100 + 8000 + 2 * 400) / span, 4),
    }
    rows = {row["kernel"]: row for row in found["kernels"]}
    assert rows["kernel_2"] == {
        "kernel": "kernel_2",
        "calls": 2,
        "total_ms": 0.004,
        "share": round(4000 / span, 4),
        "us": 2.0,
    }
    assert rows[LAST_OF_STEP]["calls"] == 3 and rows["Memcpy DtoH (Device -> Pinned)"]["us"] == 0.4
    times = [row["total_ms"] for row in found["kernels"]]
    assert times == sorted(times, reverse=True)


def test_overlapping_kernels_leave_no_pause() -> None:
    found = where_time_goes([Event("a", 0, 10_000), Event("b", 4000, 2000), Event("c", 9000, 3000)])
    assert found["idle"]["total_ms"] == 0 and found["steps"] is None
    assert sum(row["share"] for row in found["kernels"]) == pytest.approx(15 / 12, abs=1e-3)


def test_gaps_between_the_usual_steps() -> None:
    """From the last kernel to the first of the next step, the copies between them included."""
    steps = where_time_goes(decode([*range(1000, 101_000, 1000)]))["steps"]
    assert (steps["count"], steps["launches"]) == (100, 7)  # the prompt's end begins the first of them
    assert steps["gap_us_p50"] == (51_000 + 500 + 500 + 100) / 1e3
    assert steps["gap_us_p99"] == (100_000 + 500 + 500 + 100) / 1e3
    assert steps["us_p50"] == (51_000 + 500 + 500 + 4 * 2100 + 1000) / 1e3


def test_nothing_was_traced() -> None:
    assert where_time_goes([]) == {"kernels": [], "idle": {"total_ms": 0.0, "share": 0.0}, "steps": None}


def test_the_table_has_the_first_kernels_and_both_kinds_of_pauses() -> None:
    row = {"workload": "decode_b64", "seconds": 1.5, "requests": 64} | where_time_goes(decode([1000] * 50))
    head, steps, _, titles, _, *rows = _profile_table(row).splitlines()
    assert head.startswith("decode_b64: 1.5 s for 64 requests; the GPU was idle for 0.") and "%" in head
    assert steps.startswith("50 steps of 7 launches, ") and "2.1 us (median), 2.1 us (p99)" in steps
    assert titles.split()[:2] == ["kernel", "calls"] and len(rows) == 17
    assert rows[0].split() == ["kernel_0", "50", "0.10", rows[0].split()[3], "2.0"]


def test_a_cpu_has_no_kernels_to_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "profile", "--device", "cpu"]) == REFUSED
    assert "measures GPU kernels" in capsys.readouterr().err

"""The line of a measurement with prompts and decodes apart."""

import sys
from pathlib import Path

import pytest

from quire.bench.serve import LoadRun
from quire.bench.serve_client import Record

ROOT = Path(__file__).resolve().parents[3]


def test_requests_that_kept_all_bounds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    line = __import__("measure_apart").line
    runs = []
    for first, gaps in ((0.5, [0.01, 0.03]), (3.0, [0.02, 0.02])):
        record = Record(started=0.0, late=0.0)
        record.first, record.gaps, record.ended = first, gaps, first + sum(gaps)
        record.num_output = record.num_events = 3
        runs.append(LoadRun(records=[record], seconds=2.0, cpu_seconds=0.1))
    said = line("apart", 2.0, *runs, {"ttft": 2000.0, "tpot": 30.0})
    assert "median 20.0 ms, p99 29.8" in said and "short 500, 500, long 3000, 3000; 3 output" in said
    assert "1 of 2 kept" in said and sys.path[0] == str(ROOT / "tools")

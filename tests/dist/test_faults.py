"""Real ranks that die, fail or stop, and parents that do: each caller is told the cause, and nothing is left.

The times from a fault to its error are printed (`pytest -s`), not judged: 2 s are promised, and 10 s for a rank that
a signal has stopped.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import EngineDead

from ..e2e.serving import Server, running_server, wait_until
from ..support.many_ranks import SIZES, SMALL, Fault, Left, nothing_left, until
from ..support.pairwise import Row, label, pairwise

LIMIT = 20.0  # seconds to an error and to the end of all processes
LIMIT_STOPPED = 60.0
PLACES = ("load", "size", "prefill", "decode")
OPTIONS: Row = SMALL | {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M",
         "--device", "cpu")  # fmt: skip
SIZE_FLAGS = {"tp2": ("-tp", "2"), "pp2": ("-pp", "2")}
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
ENDS = {"SIGKILL": "was killed by SIGKILL", "SIGSTOP": "is stopped (SIGSTOP, or a debugger) and has sent nothing for ",
        "RuntimeError": "failed: RuntimeError: planted by a test"}  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "sizes": ["tp2", "pp2"], "rank": [0, 1], "place": list(PLACES), "kind": list(ENDS), "host": ["LLM", "server"],
}  # fmt: skip


def rows() -> list[Row]:
    return pairwise(FACTORS)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    with nothing_left(tmp_path / "tmp", LIMIT) as found:
        yield found


def told(text: str, row: Row) -> None:
    """Assert that a message names the rank and the end of it."""
    place = {"tp2": "tp", "pp2": "stage"}[row["sizes"]]
    assert f"rank {row['rank']} ({place} {row['rank']}, pid " in text and ENDS[row["kind"]] in text, text


def since(moment: Path, row: Row) -> None:
    seconds = time.monotonic() - float(moment.read_text())
    print(f"{label(row)}: told after {seconds:.3f} s")
    assert seconds < (LIMIT_STOPPED if row["kind"] == "SIGSTOP" else LIMIT)


@pytest.mark.parametrize("row", rows(), ids=label)
def test_a_fault_of_a_rank_is_told(row: Row, tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = tmp_path / "moment"
    variables = Fault(row["rank"], row["place"], row["kind"]).variables(moment)
    if row["host"] == "LLM":
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(EngineDead) as caught:
            LLM(**OPTIONS, **SIZES[row["sizes"]]).generate(["Once", "The"], LONG, use_tqdm=False)
        since(moment, row)
        told(str(caught.value), row)
    elif row["place"] in ("load", "size"):
        with running_server(*FLAGS, *SIZE_FLAGS[row["sizes"]], wait="", **variables | left.variables | {
                "PYTHONPATH": variables["PYTHONPATH"]}) as server:  # fmt: skip
            assert server.exit_code() == 1
            since(moment, row)
            told(server.stderr, row)
    else:
        with running_server(*FLAGS, *SIZE_FLAGS[row["sizes"]], **variables | left.variables | {
                "PYTHONPATH": variables["PYTHONPATH"]}) as server, ThreadPoolExecutor(4) as pool:  # fmt: skip
            asked = [pool.submit(server.complete, f"Once {i}", max_tokens=400) for i in range(4)]
            answers = [one.result() for one in asked]
            since(moment, row)
            for answer in answers:
                error = answer.error() if answer.status == 200 else answer.json()["error"]
                assert error is not None
                told(error["message"], row)
            assert server.ask("/health").status == 503
            assert server.exit_code() == 1
            assert "The engine died" in server.stderr

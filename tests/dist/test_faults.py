"""Real ranks that die, fail or stop, and parents that do: each caller is told the cause, and nothing is left.

The times from a fault to its error are printed (`pytest -s`), not judged: 2 s are promised, and 10 s for a rank that
a signal has stopped.
"""

import http.client
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.errors import EngineDead, WeightsError

from ..e2e.serving import running_server, wait_until
from ..support.many_ranks import SIZES, SMALL, Fault, Left, is_stopped, nothing_left, until
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


def rows() -> list[Any]:
    """Every pair of values; all of the product with QUIRE_FULL=1."""
    cover = pairwise(FACTORS)
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    return cover + [pytest.param(row, marks=pytest.mark.full) for row in every if row not in cover]


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
        return
    flags, started = (*FLAGS, *SIZE_FLAGS[row["sizes"]]), row["place"] in ("prefill", "decode")
    with running_server(*flags, wait="/ready" if started else "", **left.variables | variables) as server:
        if not started:
            assert server.exit_code() == 1
            since(moment, row)
            told(server.stderr, row)
            return
        with ThreadPoolExecutor(4) as pool:
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_nobody_asks_ends_the_server(rank: int, left: Left) -> None:
    with running_server(*FLAGS, "-tp", "2", **left.variables) as server:
        assert server.ask("/health").status == 200
        pid = left.ranks()[rank]
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: server.ask("/health").status == 503, "the end of the engine")
        print(f"told after {time.monotonic() - killed:.2f} s")
        assert server.exit_code() == 1
        assert f"rank {rank} (tp {rank}, pid {pid}) was killed by SIGKILL" in server.stderr
        assert "Traceback" not in server.stderr


def test_a_rank_that_dies_while_nobody_asks_is_told_to_the_next_caller(left: Left) -> None:
    with LLM(**OPTIONS, tensor_parallel_size=2) as llm:
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
        pid = left.ranks()[0]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not left.processes(), lambda: "the other rank is left")  # before anybody asks
        for _ in range(2):
            with pytest.raises(EngineDead, match=rf"rank 0 \(tp 0, pid {pid}\) was killed by SIGKILL"):
                llm.generate("x", LONG, use_tqdm=False)


PARENT = """
import sys
from quire import LLM, SamplingParams
llm = LLM(device="cpu", dtype="float32", num_threads=1, max_model_len=4096, tensor_parallel_size=2)
for _ in llm.stream("Once", SamplingParams(max_tokens=4000, ignore_eos=True)):
    print("token", flush=True)
"""


@pytest.mark.parametrize("place", ["import", "load", "decode"])
def test_ranks_do_not_outlive_a_killed_script(place: str, left: Left, tmp_path: Path) -> None:
    variables = Fault(0, "load", "SIGSTOP").variables(tmp_path / "moment") if place == "load" else {}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=os.environ | left.variables | variables,
                          stdout=subprocess.PIPE, text=True) as script:  # fmt: skip
        assert script.stdout is not None
        if place == "import":
            until(lambda: len(left.ranks()) == 2, lambda: "no ranks")
        elif place == "load":
            until((tmp_path / "moment").exists, lambda: "no rank loads")
            time.sleep(0.2)
        else:
            assert script.stdout.readline() == "token\n"
        script.kill()
        gone(left, "the script")


def gone(left: Left, what: str) -> None:
    """Assert that all processes end. A rank that a signal has stopped ends when it goes on: it is killed here."""
    killed = time.monotonic()
    until(lambda: all(is_stopped(pid) for pid in left.processes()), lambda: f"left: {left.processes()}", LIMIT)
    print(f"gone {time.monotonic() - killed:.2f} s after the death of {what}")
    for pid in left.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("what", ["the HTTP process", "the core's process"])
def test_ranks_do_not_outlive_a_killed_server(what: str, left: Left) -> None:
    with running_server(*FLAGS, "-tp", "2", **left.variables) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.complete, max_tokens=400)
        until(lambda: sum(server.metric("quire:generation_tokens_total").values()) > 0, lambda: "no token")
        core = server.core_pid
        os.kill(server.process.pid if what == "the HTTP process" else core, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: not left.ranks(), lambda: f"left: {left.ranks()}", LIMIT)
        print(f"ranks gone {time.monotonic() - killed:.2f} s after the death of {what}")
        if what == "the core's process":
            error = stream.result().error()
            assert error is not None and "engine process was killed by SIGKILL" in error["message"]
            assert server.exit_code() == 1
        else:
            with pytest.raises((OSError, http.client.HTTPException)):
                stream.result()


@pytest.mark.parametrize("host", ["LLM", "server"])
def test_a_checkpoint_that_ends_early_is_told_in_one_line(host: str, left: Left, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder)
    weights = next(folder.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1_000)
    with pytest.raises(WeightsError) as one:
        LLM(str(folder), **OPTIONS)
    if host == "LLM":
        with pytest.raises(WeightsError) as many:
            LLM(str(folder), **OPTIONS, tensor_parallel_size=2)
        assert str(many.value) == str(one.value)
        return
    with running_server(str(folder), *FLAGS, "-tp", "2", wait="", **left.variables) as server:
        assert server.exit_code() == 3
        assert server.stderr.splitlines()[-1] == f"quire: error: {one.value}"
        assert "Traceback" not in server.stderr

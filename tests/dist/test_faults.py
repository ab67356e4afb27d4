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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.errors import EngineDead, WeightsError
from quire.engine.core import EngineCore

from ..e2e.serving import Answer, Server, running_server, wait_until
from ..support import template_process
from ..support.full import full_rows
from ..support.many_ranks import LARGER, SIZES, SMALL, Fault, Left, is_stopped, nothing_left, until
from ..support.pairwise import Row, label
from ..support.template_process import SWITCH
from ..support.tiny_models import CONTEXT, Tiny, random_model

LIMIT = 20.0  # seconds to an error and to the end of all processes
LIMIT_STOPPED = 60.0
PLACES = ("load", "size", "prefill", "decode")
OPTIONS: Row = SMALL | {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
FLAGS = (
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--max-model-len",
    "512",
    "--kv-cache-memory-bytes",
    "16M",
    "--device",
    "cpu",
)
SIZE_FLAGS = {
    "tp2": ("-tp", "2"),
    "pp2": ("-pp", "2"),
    "dp2-ep": ("-dp", "2", "-ep", "--skip-tokenizer-init"),
    "tp4": ("-tp", "4"),
    "tp2-pp2": ("-tp", "2", "-pp", "2"),
    "dp4-ep": ("-dp", "4", "-ep", "--skip-tokenizer-init"),
}
NAMES = {
    "tp2": "tp {0}",
    "tp4": "tp {0}",
    "pp2": "stage {0}",
    "dp2-ep": "replica {0}",
    "dp4-ep": "replica {0}",
    "tp2-pp2": "tp 0, stage 1",
}  # of a rank; of rank 2 in the last layout
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
ENDS = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSTOP": "is stopped (SIGSTOP, or a debugger) and has sent nothing for ",
    "RuntimeError": "failed: RuntimeError: planted by a test",
}
FACTORS: dict[str, list[Any]] = {
    "sizes": ["tp2", "pp2", "dp2-ep"], "rank": [0, 1], "place": list(PLACES), "kind": list(ENDS),
    "host": ["LLM", "server"],
}  # fmt: skip


REAL: list[Row] = [  # unit/ranks/test_faults.py has every place, with ranks without a model
    {"sizes": "tp2", "rank": 1, "place": "decode", "kind": "SIGKILL", "host": "server"},
    {"sizes": "dp2-ep", "rank": 0, "place": "prefill", "kind": "SIGSTOP", "host": "LLM"},
    {"sizes": "pp2", "rank": 1, "place": "load", "kind": "RuntimeError", "host": "LLM"},
]  # fmt: skip


def more_rows() -> list[Row]:
    """The whole product, and four ranks."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    many = [
        dict(zip(FACTORS, values, strict=True))
        for values in (
            ("dp4-ep", 2, "decode", "SIGKILL", "LLM"),
            ("tp4", 3, "decode", "RuntimeError", "LLM"),
            ("tp2-pp2", 2, "prefill", "SIGKILL", "LLM"),
            ("tp4", 1, "load", "SIGKILL", "server"),
            ("dp4-ep", 3, "prefill", "RuntimeError", "server"),
            ("dp4-ep", 0, "decode", "SIGSTOP", "LLM"),
        )
    ]
    return [row for row in every if row not in REAL] + many


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    with nothing_left(tmp_path / "tmp", LIMIT) as found:
        yield found


def told(text: str, row: Row) -> None:
    """Assert that a message names the rank and the end of it."""
    place = NAMES[row["sizes"]].format(row["rank"])
    assert f"rank {row['rank']} ({place}, pid " in text and ENDS[row["kind"]] in text, text


def since(moment: Path, row: Row) -> None:
    seconds = time.monotonic() - float(moment.read_text())
    print(f"{label(row)}: told after {seconds:.3f} s")
    assert seconds < (LIMIT_STOPPED if row["kind"] == "SIGSTOP" else LIMIT)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with experts."""
    folder = tmp_path_factory.mktemp("experts")
    random_model(Tiny(family="qwen3_moe"), 0).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("row", [*REAL, *full_rows(more_rows())], ids=label)
def test_a_fault_of_a_rank_is_told(
    row: Row, tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    """Replicas that share experts end together, too."""
    options, flags, prompts = (
        OPTIONS | (LARGER | SIZES)[row["sizes"]],
        (*FLAGS, *SIZE_FLAGS[row["sizes"]]),
        ["Once", "The"],
    )
    if row["sizes"].endswith("-ep"):
        options |= {"model": experts, "max_model_len": CONTEXT, "skip_tokenizer_init": True}
        flags, prompts = (experts, *flags, "--max-model-len", str(CONTEXT)), [[1, 2, 3], [4, 5], [6], [7, 8]]
    moment = tmp_path / "moment"
    variables = Fault(row["rank"], row["place"], row["kind"]).variables(moment)
    if row["host"] == "LLM":
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(EngineDead) as caught:
            LLM(**options).generate(prompts, LONG, use_tqdm=False)
        since(moment, row)
        told(str(caught.value), row)
        return
    started = row["place"] in ("prefill", "decode")
    with running_server(*flags, wait="/ready" if started else "", **left.variables | variables) as server:
        if not started:
            assert server.exit_code() == 1
            since(moment, row)
            told(server.stderr, row)
            return
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.complete, prompts[i % len(prompts)], max_tokens=200) for i in range(4)]
            answers = [one.result() for one in asked]
            since(moment, row)
            for answer in answers:
                error = failure(answer)
                assert error is not None
                told(error["message"], row)
            assert server.ask("/health").status == 503
            assert server.exit_code() == 1
            assert "The engine died" in server.stderr


@pytest.mark.parametrize("rank", [*full_rows([0]), 1])
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


def failure(answer: Answer) -> dict[str, Any] | None:
    """Return the error of an answer: 503, or an event of a stream that has begun."""
    if "text/event-stream" in answer.headers["content-type"]:
        return answer.error()
    error: dict[str, Any] | None = answer.json().get("error")
    assert (answer.status == 200) == (error is None) and answer.status in (200, 503)
    return error


def dead(core: EngineCore) -> bool:
    """True when the end of a replica is known in this process."""
    try:
        core.executor.check_alive()
    except EngineDead:
        return True
    return False


def running(server: Server) -> dict[int, float]:
    """Return the requests that run in each replica that lives."""
    found = server.metric("quire:num_requests_running_by_replica")
    return {int(labels.partition('replica="')[2].partition('"')[0]): count for labels, count in found.items()}


@pytest.mark.parametrize(
    ("replica", "number"),
    [(0, signal.SIGKILL), *full_rows([(1, signal.SIGSTOP), (1, signal.SIGKILL), (0, signal.SIGSTOP)])],
)
def test_an_independent_replica_dies_alone(replica: int, number: signal.Signals, left: Left) -> None:
    """Its requests end with an error; those of the other one finish, and new ones are answered."""
    with running_server(*FLAGS, "-dp", "2", **left.variables) as server, ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(server.complete, f"Once {i}", max_tokens=200, stream=i < 8) for i in range(10)]
        wait_until(lambda: running(server) == {0: 5, 1: 5}, "running requests")
        pids, other = left.ranks(), 1 - replica
        os.kill(pids[replica], number)
        killed = time.monotonic()
        errors = [failure(one.result()) for one in asked]
        print(f"told after {time.monotonic() - killed:.2f} s")
        lost, name = [error for error in errors if error is not None], f"rank {replica} (replica {replica}, pid "
        assert len(lost) == 5
        for error in lost:
            assert error["code"] == "replica" and f"{name}{pids[replica]}) {ENDS[number.name]}" in error["message"]
        alone = next(i for i, error in enumerate(errors) if error is None)
        assert asked[alone].result().text() == server.complete(f"Once {alone}", max_tokens=200).text()
        assert server.ask("/health").status == 200
        wait_until(lambda: running(server) == {other: 0}, "the other replica alone")
        assert server.ask("/debug/plan").status == 200
        os.kill(pids[other], signal.SIGKILL)
        assert server.exit_code() == 1
        assert f"rank {other} (replica {other}, pid {pids[other]}) was killed by SIGKILL" in server.stderr
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize("busy", [*full_rows([False]), True])
def test_an_idle_replica_that_dies_gets_no_request(busy: bool, left: Left) -> None:
    with running_server(*FLAGS, "-dp", "2", **left.variables) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.complete, max_tokens=400) if busy else None
        if busy:
            wait_until(lambda: sum(running(server).values()) == 1, "a running request")
        idle = next((number for number, count in running(server).items() if not count), 0)
        pid = left.ranks()[idle]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_stopped(pid), "the end of the rank")
        wait_until(lambda: running(server).keys() == {1 - idle}, "the other replica alone")
        assert all(server.complete(max_tokens=4).error() is None for _ in range(4))
        assert stream is None or stream.result().error() is None


def test_replicas_that_die_while_nobody_asks(left: Left) -> None:
    """An `LLM` goes on with one; the end of the last one is told to every caller."""
    with LLM(**OPTIONS, data_parallel_size=2) as llm:
        llm.generate(["x", "y"], SamplingParams(max_tokens=1), use_tqdm=False)
        first, second = left.ranks()
        os.kill(first, signal.SIGKILL)
        until(lambda: dead(llm.engine.core.cores[0]), lambda: "the first replica lives")
        outputs = llm.generate(["x", "y", "z"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
        os.kill(second, signal.SIGKILL)
        until(lambda: dead(llm.engine.core.cores[1]), lambda: "the second replica lives")
        for _ in range(2):
            with pytest.raises(EngineDead, match=rf"rank 1 \(replica 1, pid {second}\) was killed by SIGKILL"):
                llm.generate("x", LONG, use_tqdm=False)


PARENT = """
import sys
from quire import LLM, SamplingParams
llm = LLM(device="cpu", dtype="float32", num_threads=1, max_model_len=4096, tensor_parallel_size=2)
for _ in llm.stream("Once", SamplingParams(max_tokens=4000, ignore_eos=True)):
    print("token", flush=True)
"""


@pytest.mark.parametrize("place", [*full_rows(["import", "load"]), "decode"])
def test_ranks_do_not_outlive_a_killed_script(place: str, left: Left, tmp_path: Path) -> None:
    variables = Fault(0, "load", "SIGSTOP").variables(tmp_path / "moment") if place == "load" else {}
    if place == "import":
        variables[SWITCH] = "0"  # a copy has imported all
    with template_process.start(
        ["-c", PARENT],
        env=os.environ | left.variables | variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as script:
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

"""Engines on two hosts, which are two programs on the loopback: the answers of one rank, faults, and nothing left.

The second host is `quire serve --headless`. It gets its flags, and its key, from its own command line and environment.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.config.bundled import bundled_model
from quire.config.env import CLUSTER_KEY
from quire.contracts.errors import EngineDead

from ..e2e.serving import running_server
from ..support import eagle, even_replicas, template_process
from ..support.addresses import free_port
from ..support.full import full_rows
from ..support.many_ranks import LARGER, ROOT, SIZES, SMALL, Left, until
from ..support.pairwise import Row
from .conftest import make_engine
from .test_answers import CHECKED, ask, compare, requests
from .test_faults import FLAGS

KEY = "the key of these tests"
OPTIONS: Row = SMALL | {"device": "cpu", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
WAIT = 60


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, left: Left) -> None:
    monkeypatch.setenv(CLUSTER_KEY, KEY)


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    return free_port()


class Agent:
    """The second of two hosts as a process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and what it has printed."""
        out, _ = self.process.communicate(timeout=WAIT)
        return self.process.returncode, out


@contextmanager
def agent(
    port: int, model: str = "", flags: tuple[str, ...] = (), place: str = "--nnodes 2 --node-rank 1", **environment: str
) -> Iterator[Agent]:
    words = ["-m", "quire", "serve", *([model] if model else []), "--headless", *place.split(), *flags]
    with template_process.start(
        [*words, "--master-port", str(port), "--device", "cpu"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Agent(process)
        finally:
            process.kill()


def hosted(port: int, **options: Any) -> LLM:
    return LLM(**(OPTIONS | {"nnodes": 2, "master_port": port} | options))


@pytest.mark.parametrize("sizes", ["pp2", "dp2-ep", *full_rows(["tp2", "dp2", "tp2-pp2", "dp4-ep"])])
def test_answers_of_one_rank(
    sizes: str, port: int, checkpoint: Callable[[str], Path], truth: Callable[..., list[RequestOutput]]
) -> None:
    options: Row = CHECKED | {"block_size": 16, "max_num_batched_tokens": 48} | (LARGER | SIZES)[sizes]
    folder = checkpoint("qwen3_moe")
    with agent(port, str(folder)) as other:
        with make_engine(folder, **options, nnodes=2, master_port=port) as llm:
            found = ask(llm, requests(24))
        code, out = other.end()
        assert code == 0 and "the engine has ended" in out
    compare(found, truth(requests(24), folder))


@pytest.mark.parametrize("sizes", full_rows(["dp2-ep", "dp2-tp2-ep", "dp4-ep"]))
def test_replicas_of_two_hosts_exchange_fixed_numbers_of_rows(
    sizes: str,
    port: int,
    checkpoint: Callable[[str], Path],
    truth: Callable[..., list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As GPUs do in CUDA graphs."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    options: Row = CHECKED | {"block_size": 16, "max_num_batched_tokens": 48} | (LARGER | SIZES)[sizes]
    folder = checkpoint("qwen3_moe")
    with agent(port, str(folder)) as other:
        with make_engine(folder, **options, nnodes=2, master_port=port) as llm:
            llm.engine.core.executor.control("attach", {"module": even_replicas.__name__})
            found, again = ask(llm, requests(24)[:5]), ask(llm, requests(24)[:1])
            bounds: Any = llm.engine.core.executor.control("bounds", {})
        code, out = other.end()
        assert code == 0 and "the engine has ended" in out
    compare(found, truth(requests(24), folder)[:5])
    compare(again, truth(requests(24), folder)[:1])
    assert all(one == bounds[0] for one in bounds) and set(bounds[0]) >= {0, 2}


@pytest.mark.parametrize(("own", "there"), full_rows([(0, (2,)), (1, (2,)), (0, (1, 2))]))
def test_hosts_with_other_numbers_of_replicas(
    own: int,
    there: tuple[int, ...],
    port: int,
    checkpoint: Callable[[str], Path],
    truth: Callable[..., list[RequestOutput]],
) -> None:
    """The first host may have the server alone. Replicas share experts, so that they meet."""
    folder, sizes = checkpoint("qwen3_moe"), {"data_parallel_size": own + sum(there), "enable_expert_parallel": True}
    flags = ("-dp", str(own + sum(there)), "--enable-expert-parallel")
    with ExitStack() as stack:
        firsts = accumulate((own, *there))
        others = [
            stack.enter_context(agent(port, str(folder), flags, f"-dpl {local} --data-parallel-start-rank {first}"))
            for local, first in zip(there, firsts, strict=False)
        ]
        options: Row = CHECKED | sizes | {"data_parallel_size_local": own, "master_port": port}
        with make_engine(folder, **options) as llm:
            found = ask(llm, requests(24))
        for other in others:
            code, out = other.end()
            assert code == 0 and "the host of ranks" in out and "the engine has ended" in out
    compare(found, truth(requests(24), folder))


def test_an_eagle_head_is_found_on_each_host(port: int, tmp_path: Path, truth: Any) -> None:
    """The hosts have the head in folders of other names."""
    folder = eagle.model(tmp_path / "model", bundled_model(), 0.0)
    heads = [str(tmp_path / name) for name in ("head", "there")]
    eagle.write(Path(heads[0]), "eagle3", eagle.knowing("eagle3", folder))
    shutil.copytree(*heads)
    given = [{"method": "eagle3", "model": head, "num_speculative_tokens": 2} for head in heads]
    with agent(port, str(folder), ("--speculative-config", json.dumps(given[1]))) as other:
        options: Row = CHECKED | SIZES["tp2"] | {"nnodes": 2, "master_port": port}
        with make_engine(folder, **options, speculative_config=given[0]) as llm:
            found, totals = ask(llm, requests(16)), llm.engine.core.scheduler.drafts.totals
        code, out = other.end()
        assert code == 0 and "the engine has ended" in out
    compare(found, truth(requests(16), folder))
    assert sum(totals[2:]) > 20


def test_slices_of_a_layer_on_several_hosts_are_noted(port: int) -> None:
    with agent(port), hosted(port, tensor_parallel_size=2) as llm:
        assert any(note.startswith("-tp 2: slices of a layer are on several hosts") for note in llm.engine.notes)


def dies(llm: LLM, strike: Callable[[], object]) -> str:
    """Generate, strike after the first token, and return the words of the error."""
    with pytest.raises(EngineDead) as caught:
        for number, _ in enumerate(llm.stream("Once", LONG)):
            if number == 1:
                strike()
                struck = time.monotonic()
    print(f"told after {time.monotonic() - struck:.3f} s")
    return str(caught.value)


def test_a_rank_of_the_other_host_is_killed(left: Left, port: int) -> None:
    with agent(port) as other, hosted(port, tensor_parallel_size=2) as llm:
        pid = rank_of(other, left)
        words = dies(llm, lambda: os.kill(pid, signal.SIGKILL))
        assert f"rank 1 (tp 1, pid {pid} on {os.uname().nodename}, node 1) was killed by SIGKILL" in words
        code, out = other.end()
        assert code == 1, out


def rank_of(other: Agent, left: Left) -> int:
    """Return the process of the agent's rank."""
    (pid,) = [
        pid
        for pid in left.ranks()
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == other.process.pid
    ]
    return pid


@pytest.mark.parametrize(
    "number, how",
    [(signal.SIGKILL, "its agent closed the connection"), (signal.SIGTERM, "its agent was ended by SIGTERM")],
)
def test_the_agent_ends(number: signal.Signals, how: str, left: Left, port: int) -> None:
    with agent(port) as other, hosted(port, tensor_parallel_size=2) as llm:
        pid = rank_of(other, left)
        words = dies(llm, lambda: other.process.send_signal(number))
        assert f"rank 1 (tp 1, pid {pid} on {os.uname().nodename}, node 1) was lost: {how}" in words
        until(lambda: not left.ranks(), lambda: f"left: {left.ranks()}")


def test_an_independent_replica_goes_on_without_the_other_host(left: Left, port: int) -> None:
    with agent(port) as other, hosted(port, data_parallel_size=2) as llm:
        llm.generate(["Once", "The"], SamplingParams(max_tokens=4), use_tqdm=False)
        other.process.kill()
        until(lambda: len(left.ranks()) == 1, lambda: f"left: {left.ranks()}")
        for _ in range(2):  # the first requests may have been those of the dead replica
            try:
                answers = llm.generate(["Once", "The"], SamplingParams(max_tokens=4), use_tqdm=False)
            except EngineDead:
                continue
        assert len(answers) == 2


MASTER = """
import sys
from quire import LLM, RequestOutput, SamplingParams
llm = LLM(device="cpu", dtype="float32", num_threads=1, max_model_len=4096, tensor_parallel_size=2, nnodes=2,
          master_port=int(sys.argv[1]))
for _ in llm.stream("Once", SamplingParams(max_tokens=4000, ignore_eos=True)):
    print("token", flush=True)
"""


def master_of(port: int) -> "subprocess.Popen[str]":
    return template_process.start(["-c", MASTER, str(port)], stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_killed_master_leaves_nothing(left: Left, port: int) -> None:
    with agent(port) as other:
        with master_of(port) as master:
            assert master.stdout is not None and master.stdout.readline() == "token\n"
            master.kill()
        code, out = other.end()
        assert code == 1 and f"the engine on 127.0.0.1:{port} is gone: the ranks of this host were ended" in out
        until(lambda: not left.processes(), lambda: f"left: {left.processes()}")


def test_a_host_with_another_key_is_refused(port: int) -> None:
    """The master waits meanwhile for the right one."""
    with agent(port, **{CLUSTER_KEY: "the key of another cluster"}) as wrong:
        with master_of(port) as master:
            code, out = wrong.end()
            assert code == 3 and "has another key: set QUIRE_CLUSTER_KEY to the same text on all hosts" in out
            with agent(port) as right:
                assert master.stdout is not None and master.stdout.readline() == "token\n"
                right.process.kill()
            assert master.wait(WAIT) == 1


def test_a_host_with_another_model_is_refused(checkpoint: Callable[[str], Path], port: int) -> None:
    with master_of(port) as master:
        with agent(port, str(checkpoint("qwen3_moe"))) as other:
            code, out = other.end()
        assert code == 3 and "its model has other files than that of the first host" in out
        master.kill()


def test_a_server_on_two_hosts(left: Left, port: int) -> None:
    with (
        agent(port) as other,
        running_server(*FLAGS, "-tp", "2", "--nnodes", "2", "--master-port", str(port), **left.variables) as server,
    ):
        assert server.complete(max_tokens=8).status == 200
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0 and other.end()[0] == 0


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--headless",), "leave headless out"),
        (("--node-rank", "1"), "1 hosts have the numbers 0 to 0"),
        (("--nnodes", "2", "--node-rank", "1", "-tp", "2"), "only host 0 has an engine core"),
        (("--nnodes", "2", "-tp", "3"), "cannot be divided"),
        (("--nnodes", "2"), "cannot be divided"),
        (("--nnodes", "2", "-tp", "2", "--master-addr", "0.0.0.0"), "cannot connect to this address"),
    ],
    ids=lambda one: " ".join(one),
)
def test_flags_that_do_not_fit(flags: tuple[str, ...], words: str, left: Left) -> None:
    with running_server("--device", "cpu", *flags, wait="", **left.variables) as server:
        assert server.exit_code() == 3
        assert words in server.stderr.replace("-", " ").replace("_", " ") or words in server.stderr

"""Tiers of KV blocks over several ranks: each copies its part, and a block that one rank lacks is computed by all."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.env import CLUSTER_KEY
from quire.contracts.step import Tier
from quire.engine.replicas import flush

from ..support.addresses import free_address
from ..support.full import full_rows
from ..support.many_ranks import SIZES, SMALL, Left
from .test_hosts import KEY, Agent, agent, dies, rank_of

TIERS = {
    "num_gpu_blocks_override": 14,
    "max_model_len": 192,
    "block_size": 16,
    "kv_offload_gb": 0.02,
    "kv_offload_policy": "write_through",
}
PROMPTS = [
    word * 6
    for word in (
        "Tomas drinks tea in the garden. ",
        "The code of Lakral is 6423, Mira says. ",
        "def add(a, b): return a + b\n",
    )
]


def ask(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Return tokens and cached tokens of the prompts, one after the other."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in PROMPTS]
    return [one.outputs[0].token_ids for one in found], [one.num_cached_tokens or 0 for one in found]


def disk(llm: LLM) -> Any:
    flush(llm.engine.core)
    llm.engine.core.check()
    return llm.engine.core.state().stats.tiers[Tier.DISK]


@pytest.mark.parametrize("sizes", ["tp2", *full_rows(["pp2"])])
def test_ranks_keep_and_find_their_parts(sizes: str, tmp_path: Path) -> None:
    with LLM(**SMALL, **TIERS) as llm:
        truth = ask(llm)[0]
    options = SMALL | TIERS | SIZES[sizes] | {"kv_offload_dir": str(tmp_path)}
    with LLM(**options) as llm:
        assert ask(llm)[0] == truth
        tokens, cached = ask(llm)
        assert tokens == truth and min(cached) >= 64
        assert disk(llm).num_stored >= 12
    ranks = sorted(tmp_path.glob("*/*"))
    assert len(ranks) == 2
    for path in ranks[1].rglob("*.kv"):  # of one rank alone
        path.write_bytes(path.read_bytes()[:-1])
    with LLM(**options) as llm:
        tokens, cached = ask(llm)
        assert tokens == truth and not any(cached), "a block is whole when all ranks have it"
        assert disk(llm).num_failed >= 3


@pytest.mark.parametrize("sizes", full_rows(["tp2", "pp2"]))
def test_each_host_keeps_its_parts_in_a_folder_of_its_own(
    sizes: str, left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that one host lacks is computed by all ranks. Files alone are left when a host is killed."""
    hosts = [tmp_path / "host", tmp_path / "other"]
    for name, text in ((CLUSTER_KEY, KEY), ("HOME", str(hosts[0]))):
        monkeypatch.setenv(name, text)
    options = SMALL | TIERS | SIZES[sizes] | {"kv_offload_dir": "~/kv"}

    @contextmanager
    def engine() -> Iterator[tuple[LLM, Agent]]:
        port = int(free_address().rpartition(":")[2])
        with agent(port, HOME=str(hosts[1])) as other, LLM(**options, nnodes=2, master_port=port) as llm:
            yield llm, other

    def kept() -> list[dict[str, bytes]]:
        """Return name -> content of the files of each host."""
        return [{path.name: path.read_bytes() for path in (host / "kv").rglob("*.kv")} for host in hosts]

    with LLM(**SMALL, **TIERS) as llm:
        truth = ask(llm)[0]
    with engine() as (llm, other):
        tokens, cached = ask(llm)
        assert tokens == truth and not any(cached) and disk(llm).num_stored >= 12
    assert other.end()[0] == 0
    here, there = kept()
    assert here.keys() == there.keys() and here != there
    with engine() as (llm, other):
        tokens, cached = ask(llm)
        assert tokens == truth and min(cached) >= 64 and disk(llm).num_failed == 0
        dies(llm, lambda: os.kill(rank_of(other, left), signal.SIGKILL))
        assert other.end()[0] == 1
    shutil.rmtree(hosts[1])
    with engine() as (llm, other):
        tokens, cached = ask(llm)
        assert tokens == truth and not any(cached), "a block is whole when all hosts have it"
        assert disk(llm).num_stored >= 12 and all(kept())
        llm.reset_prefix_cache()
    assert other.end()[0] == 0 and kept() == [{}, {}]

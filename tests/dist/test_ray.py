"""An engine on two nodes of Ray, both on this machine: the answers of one rank; a node that goes is named."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.assemble.ray_launcher import in_order
from quire.contracts.errors import ConfigError, EngineDead
from quire.contracts.step import Tier
from quire.engine.replicas import flush

from ..support.addresses import free_address
from ..support.full import only_full
from ..support.many_ranks import SIZES, SMALL, is_rank, until
from .test_answers import ask, compare, texts

OPTIONS: dict[str, Any] = SMALL | {"device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)


def test_the_nodes_of_ranks_begin_with_the_driver_s() -> None:
    assert in_order({0: "b", 1: "a", 2: "b", 3: "c"}, "a") == [1, 0, 2, 3]
    assert in_order({1: "b", 0: "c", 2: "c"}, "a") == [0, 2, 1]


def test_without_ray_the_way_to_get_it_is_told() -> None:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ConfigError, match=r"Ray is not installed: `pip install 'quire\[ray\]'`"):
            LLM(**OPTIONS, tensor_parallel_size=2, distributed_executor_backend="ray")
    else:
        pytest.skip("Ray is installed")


@pytest.fixture
def nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes with a place for one rank each, and its second node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'quire[ray]'")
    cluster = utils.Cluster(
        initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "resources": {"quire_rank": 1}}
    )
    second = cluster.add_node(num_cpus=2, resources={"quire_rank": 1})
    try:
        yield cluster, second
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


def ranks_here() -> list[int]:
    """The processes of ranks on this machine that are this test's: no other test runs ranks at the same time."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and is_rank(int(entry))]


def prompt(llm: LLM) -> list[int]:
    """Return the tokens after a prompt of several blocks."""
    ids = [(7 * i) % 500 + 300 for i in range(145)]
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    return output.outputs[0].token_ids


@only_full
def test_two_nodes_answer_and_one_that_goes_is_named(nodes: tuple[Any, Any], tmp_path: Path) -> None:
    cluster, second = nodes
    before = ranks_here()
    with LLM(**OPTIONS) as one:
        expected, truth = ask(one, texts()), prompt(one)
    tiers = {"kv_offload_gb": 0.02, "kv_offload_policy": "write_through", "kv_offload_dir": str(tmp_path / "kv")}
    ray = OPTIONS | SIZES["tp2"] | {"distributed_executor_backend": "ray"}
    share, ours = free_address(), free_address(3)
    role = {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": "kv_both"}}
    with LLM(**OPTIONS, **role, kv_offload_gb=0.02, kv_share=share, kv_peers=(ours,)) as other:
        with LLM(**ray, **tiers, kv_share=ours, kv_peers=(share,)) as llm:
            compare(ask(llm, texts()), expected)
            assert len(ranks_here()) == len(before) + 2 and prompt(llm) == truth
            flush(llm.engine.core)
            assert llm.engine.core.state().stats.tiers[Tier.DISK].num_stored > 0
            reader = other.engine.core.scheduler.roster.store
            own = llm.engine.core.scheduler.roster.store.host._index.keys()
            until(lambda: reader.sharing._promises._peers[0].keys == own, lambda: "no block is heard of")
            assert prompt(other) == truth
            assert reader.stats[Tier.PEER].num_loaded > 0 and reader.stats[Tier.PEER].num_failed == 0
    until(lambda: ranks_here() == before, lambda: f"left: {ranks_here()}")
    with LLM(**ray, **tiers) as llm:
        assert prompt(llm) == truth
        flush(llm.engine.core)
        assert llm.engine.core.state().stats.tiers[Tier.DISK].num_loaded > 0
    until(lambda: ranks_here() == before, lambda: f"left: {ranks_here()}")

    with LLM(**OPTIONS, **SIZES["tp2"], distributed_executor_backend="ray") as llm:
        with pytest.raises(EngineDead) as caught:
            for number, _ in enumerate(llm.stream("Once", LONG)):
                if number == 1:
                    cluster.remove_node(second)
                    removed = time.monotonic()
        print(f"told after {time.monotonic() - removed:.2f} s: {caught.value}")
        assert "rank 1 (tp 1, pid " in str(caught.value) and ", Ray node " in str(caught.value)
        until(lambda: ranks_here() == before, lambda: f"left: {ranks_here()}")
    with pytest.raises(ConfigError, match="2 ranks need 2 of the resource quire_rank, and the Ray cluster has 1"):
        LLM(**OPTIONS, **SIZES["tp2"], distributed_executor_backend="ray")

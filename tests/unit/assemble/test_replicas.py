"""Replicas as the plan of an engine joins them."""

import threading
from pathlib import Path

import pytest

from quire.assemble.engine import join_replicas
from quire.config.engine import EngineConfig
from quire.engine.replicas import Replicas
from quire.explain.describe import plan_engine


@pytest.mark.parametrize(("hosts", "nodes"), [((), 1), ((0, 0, 0, 0), 1), ((0, 0, 1, 1), 2)])
def test_experts_are_balanced_by_groups_where_hosts_have_equally_many_ranks(
    shared: Path, hosts: tuple[int, ...], nodes: int
) -> None:
    """The hierarchical policy gets the router's groups and the hosts."""
    config = EngineConfig.from_flat(
        model=str(shared / "hf" / "DeepSeek-V3"), data_parallel_size=4, enable_eplb=True, enable_expert_parallel=True
    )
    joined = join_replicas(plan_engine(config, "h200").plan, [], threading.Event(), hosts)
    assert isinstance(joined, Replicas) and joined.balancer is not None
    assert (joined.balancer._groups, joined.balancer._nodes) == (8, nodes)
    joined.shutdown()

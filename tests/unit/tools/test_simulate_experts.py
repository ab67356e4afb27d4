"""The simulation of experts routes as DeepSeek-V3 does, and counts what crosses between ranks."""

import numpy as np
import pytest

from quire.engine.eplb import initial_map
from simulate_experts import EXPERTS, GROUPS, KEPT, TOP_K, counted, crossing, in_a_step, intervals, placements, route


def test_a_token_has_distinct_experts_of_few_groups() -> None:
    draw = np.random.default_rng(0)
    for layer in route(next(intervals(0.7, draw)), 50, draw):
        for ids in layer.tolist():
            assert len(set(ids)) == TOP_K
            assert len({expert // (EXPERTS // GROUPS) for expert in ids}) <= KEPT


def test_drift_keeps_the_unevenness() -> None:
    spreads = [float(np.log(popularity).std()) for popularity in intervals(1.0, np.random.default_rng(0))]
    assert spreads == pytest.approx([spreads[0]] * len(spreads), rel=0.05)


def test_rows_that_cross() -> None:
    """16 ranks of two hosts, an expert each; a row of each rank."""
    experts = initial_map(1, 16, 0, 16)
    ids = np.array([[[rank, (rank + 1) % 16, (rank + 8) % 16] for rank in range(16)]], np.int32)
    assert crossing(experts, ids) == (2.0, 1.0, 2.0)
    pairs = initial_map(1, 32, 0, 16)
    assert crossing(pairs, np.full((1, 16, 2), [2, 3], np.int32)) == (15 / 16, 8 / 16, 30 / 16)


def test_every_placement_is_judged() -> None:
    draw = np.random.default_rng(0)
    ids = route(next(intervals(0.7, draw)), 64, draw)
    load = counted(ids, EXPERTS)
    assert load.sum() == ids.size
    for placement in placements(32):
        experts = placement.next(load, placement.first(len(ids)))
        assert in_a_step(experts, ids) >= 1.0

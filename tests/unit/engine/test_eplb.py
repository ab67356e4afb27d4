"""Balancing of experts: the published algorithm, written again from its description, and what must always hold."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from quire.config.balancing import GOLDEN, SPREAD
from quire.engine.eplb import (
    ExpertMap,
    balanced_map,
    balancedness,
    even_nodes,
    expert_map,
    initial_map,
    moves,
)

from ...support.expert_copies import choose, choose_copy

# -- the algorithm from its description ------------------------------------------------------------


def pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """The items of each pack: the heaviest item first, each to the lightest pack that is not full."""
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    held: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min((one for one in range(packs) if len(held[one]) < room), key=lambda one: total[one])
        held[lightest].append(item)
        total[lightest] += weights[item]
    return held


def replicate(weights: Sequence[float], total: int) -> list[int]:
    """The items of `total` slots: each once, then again and again the item with the most weight per slot."""
    held = list(range(len(weights)))
    while len(held) < total:
        held.append(max(range(len(weights)), key=lambda item: weights[item] / held.count(item)))
    return held


def reference(load: Sequence[int], num_slots: int, ranks: int, groups: int, nodes: int) -> list[int]:
    """The expert in each slot of a layer."""
    if groups % nodes:
        groups = nodes = 1
    size, slots = len(load) // groups, []
    of_groups = [sum(load[group * size : (group + 1) * size]) for group in range(groups)]
    for on_node in pack(of_groups, nodes):
        experts = [group * size + place for group in on_node for place in range(size)]
        copies = replicate([load[expert] for expert in experts], num_slots // nodes)
        shares = [load[experts[copy]] / copies.count(copy) for copy in copies]
        for on_rank in pack(shares, ranks // nodes):
            slots += [experts[copies[place]] for place in on_rank]
    return slots


# -- random cases ----------------------------------------------------------------------------------


@dataclass
class Case:
    """Sizes, and the loads of two windows, [L, E] each."""

    ranks: int
    groups: int
    nodes: int
    redundant: int
    loads: list[Any]

    def map(self, which: int = 0, old: ExpertMap | None = None) -> ExpertMap:
        """The map for a window's load."""
        return balanced_map(
            self.loads[which], self.redundant, self.ranks, groups=self.groups, nodes=self.nodes, old=old
        )

    def first(self) -> ExpertMap:
        """The map before any load."""
        return initial_map(*self.loads[0].shape, self.redundant, self.ranks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few experts and many; ties, zeros and large counts; nodes that divide the groups and nodes that do not."""
    nodes, groups, size = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 8)), draw(st.integers(1, 5))
    num_experts, ranks = groups * size, nodes * draw(st.integers(1, 4))
    redundant = -num_experts % ranks + ranks * draw(st.integers(0, 3))
    counts = st.integers(0, draw(st.sampled_from([1, 7, 1000, 10**7])))
    shape = (draw(st.integers(1, 3)), num_experts)
    return Case(ranks, groups, nodes, redundant, [draw(arrays.arrays(np.int64, shape, elements=counts)) for _ in "ab"])


def per_rank(experts: ExpertMap) -> list[list[Counter[int]]]:
    """The experts of each rank, of each layer."""
    return [[Counter(part.tolist()) for part in np.split(held, experts.ranks)] for held in experts.experts]


# -- policy ----------------------------------------------------------------------------------------


def test_the_published_example() -> None:
    """Two layers, 12 experts in 4 groups, 16 slots on 8 GPUs of 2 nodes: as in the README of DeepSeek's EPLB."""
    load = np.array(
        [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
    )
    found = balanced_map(load, 4, 8, groups=4, nodes=2)
    assert found.experts.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    tokens = found.rank_load(load)
    np.testing.assert_allclose(tokens.mean(axis=1) / tokens.max(axis=1), [0.8277, 0.8050], atol=5e-5)


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ([], 1),
        ([0, 0, 0, 0], 1),
        ([0, 0, 1, 1], 2),
        ([0, 1, 2, 3], 4),
        ([3, 3, 0, 0], 2),
        ([0, 0, 0, 1], 1),
        ([0, 1, 0, 1], 1),
        ([0, 1, 1, 0], 1),
        ([0, 0, 1], 1),
    ],
)
def test_hosts_are_nodes_where_each_has_equally_many_neighbouring_ranks(hosts: list[int], nodes: int) -> None:
    assert even_nodes(hosts) == nodes


@settings(deadline=None, max_examples=300)
@given(cases())
def test_the_policy_is_the_published_one(case: Case) -> None:
    num_slots = case.loads[0].shape[1] + case.redundant
    for layer, load in enumerate(case.loads[0].tolist()):
        expected = reference(load, num_slots, case.ranks, case.groups, case.nodes)
        assert case.map().experts[layer].tolist() == expected


@settings(deadline=None)
@given(cases())
def test_every_expert_has_a_slot_and_every_rank_equally_many(case: Case) -> None:
    for experts in (case.first(), case.map()):
        layers, num_experts = experts.counts.shape
        assert experts.experts.shape == (layers, num_experts + case.redundant)
        assert experts.each * case.ranks == num_experts + case.redundant
        for layer in range(layers):
            held = experts.experts[layer].tolist()
            for expert in range(num_experts):
                slots = [slot for slot, one in enumerate(held) if one == expert]
                empty = [-1] * (case.redundant + 1 - len(slots))
                assert slots and experts.counts[layer, expert] == len(slots)
                assert experts.slots[layer, expert].tolist() == slots + empty


@settings(deadline=None)
@given(cases())
def test_experts_that_stay_on_a_rank_keep_their_slot(case: Case) -> None:
    old = case.first()
    free, kept = case.map(), case.map(old=old)
    assert per_rank(free) == per_rank(kept)
    for layer, (before, after) in enumerate(zip(per_rank(old), per_rank(kept), strict=True)):
        needed = sum((new - had).total() for had, new in zip(before, after, strict=True))
        assert np.count_nonzero(old.experts[layer] != kept.experts[layer]) == needed


def test_the_map_before_any_load() -> None:
    assert initial_map(2, 4, 2, 3).experts.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert initial_map(1, 4, 2, 3, in_turn=True).experts.tolist() == [[0, 3, 1, 0, 2, 1]]


def test_without_redundant_experts_hot_ones_are_put_apart() -> None:
    load = np.array([[100, 90, 1, 2]])
    assert balancedness(load, initial_map(1, 4, 0, 2)) == pytest.approx(193 / 2 / 190)
    found = balanced_map(load, 0, 2)
    assert per_rank(found) == [[Counter([0, 2]), Counter([1, 3])]]
    assert balancedness(load, found) == pytest.approx(193 / 2 / 101)


def test_balancedness_sums_over_layers() -> None:
    experts = initial_map(2, 4, 0, 2)
    assert balancedness(np.array([[3, 3, 0, 0], [1, 1, 1, 1]]), experts) == pytest.approx((3 + 2) / (6 + 2))
    assert balancedness(np.zeros((2, 4), np.int64), experts) == 1.0
    copied = expert_map(np.array([[0, 1, 0, 2]]), 3, 2)
    assert copied.rank_load(np.array([[8, 2, 4]])).tolist() == [[6.0, 8.0]]


# -- moves -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(cases())
def test_moves_make_the_new_map_of_the_old_one(case: Case) -> None:
    old = case.map()
    new = case.map(1, old=old)
    for before, after, steps in zip(old.experts, new.experts, moves(old, new), strict=True):
        weights = before.copy()
        for destination, source in steps:
            assert before[destination] != after[destination], "a slot that keeps its expert is written"
            near = before[destination // old.each * old.each :][: old.each]
            if after[destination] in near:
                assert source // old.each == destination // old.each, "the rank has the expert itself"
            weights[destination] = before[source]
        assert weights.tolist() == after.tolist()


def test_the_copies_of_an_expert_share_the_sending() -> None:
    """Ranks 0 and 1 have expert 0. Rank 0 copies it to its other slots, which is not sending; ranks 2 and 3 get it."""
    old = expert_map(np.array([[0, 3, 3, 0, 2, 2, 3, 1, 1, 3, 1, 2]]), 4, 4)
    new = expert_map(np.array([[0, 0, 0, 0, 2, 2, 3, 0, 1, 3, 0, 2]]), 4, 4)
    ((*within, to_two, to_three),) = moves(old, new)
    assert within == [(1, 0), (2, 0)]
    assert (to_two[0], to_three[0]) == (7, 10) and {to_two[1], to_three[1]} == {0, 3}


# -- choice of a copy ------------------------------------------------------------------------------


@settings(deadline=None)
@given(cases(), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_every_rank_chooses_the_same_slot_and_no_token_is_lost(case: Case, seed: int, rows: list[int]) -> None:
    experts = case.map()
    layers, num_experts = experts.counts.shape
    ids = np.random.default_rng(seed).integers(0, num_experts, (sum(rows), 2)).astype(np.int32)
    load, tokens = np.zeros((layers, num_experts), np.int64), np.zeros(experts.experts.shape, np.int64)
    for layer in range(layers):
        chosen = choose(experts, layer, ids)
        assert (experts.experts[layer][chosen] == ids).all(), "the slot holds another expert"
        first = 0
        for count in rows:  # a rank that has only its own rows
            assert (choose(experts, layer, ids[first : first + count], first) == chosen[first : first + count]).all()
            first += count
        np.add.at(tokens[layer], chosen, 1)
        np.add.at(load[layer], ids, 1)
    total = np.zeros_like(load)
    np.add.at(total, (np.arange(len(total))[:, None], experts.experts), tokens)
    assert total.tolist() == load.tolist()


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("each", [5, 16, 64, 128])
def test_the_rows_of_every_rank_are_divided_among_all_copies(each: int, count: int) -> None:
    """Also those of the last ranks alone: a choice by the rank's number would send them all to one copy."""
    for expert in (0, 1, 255):
        chosen = choose_copy(np.arange(32 * each), np.array(expert), np.array(count))
        assert chosen.min() == 0 and chosen.max() == count - 1
        for rank in range(32):
            shares = np.bincount(chosen[rank * each : (rank + 1) * each], minlength=count)
            assert abs(shares - each / count).max() < 3


@pytest.mark.parametrize("each", [1, 16, 64, 128, 256, 1024, 4096])
def test_the_same_row_of_every_rank_goes_to_different_copies(each: int) -> None:
    last = np.arange(32) * each + each - 1
    for count in (2, 3, 4):
        shares = np.bincount(choose_copy(last, np.array(3), np.array(count)), minlength=count)
        assert shares.max() <= 1.3 * 32 / count


def test_experts_of_a_row_do_not_all_choose_the_same_copy() -> None:
    chosen = choose_copy(np.zeros(256), np.arange(256), np.array(2))
    assert 100 < chosen.sum() < 156


@given(st.integers(0, 2**31 - 1), st.integers(0, 1023), st.integers(1, 65))
def test_a_kernel_computes_the_choice_in_32_bits(row: int, expert: int, count: int) -> None:
    place = (row * GOLDEN % 2**32 + expert * SPREAD % 2**32) % 2**32
    assert choose_copy(np.array(row), np.array(expert), np.array(count)) == place * count // 2**32  # umulhi


# -- load ------------------------------------------------------------------------------------------

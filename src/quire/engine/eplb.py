"""Balancing of experts (EPLB): where copies of experts lie. `kernels/expert_copies/slots.py` chooses among them.

The policy is the algorithm of DeepSeek's EPLB (2025): hot experts get more slots, and slots are packed onto ranks so
that every rank has about equally many tokens. Pure numpy: nothing here knows weights, processes or devices.

    L layers with experts      E experts of a layer      P slots of a layer = E + redundant ones
    A slot holds the weights of one expert. Slot p is on rank p // (P / ranks).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.contracts.step import I32

I64 = np.ndarray[Any, np.dtype[np.int64]]
F64 = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[Any]]  # whole numbers or fractions


@dataclass(frozen=True, eq=False)
class ExpertMap:
    """The experts in the slots of every layer, and the slots of every expert.

    experts   [L, P]: the expert in each slot
    slots     [L, E, P - E + 1]: the slots of each expert in ascending order, then -1. All maps of a model have this
              shape, so that a map on a device is replaced in place
    counts    [L, E]: number of slots of each expert
    ranks     number of ranks
    """

    experts: I32
    slots: I32
    counts: I32
    ranks: int

    @property
    def each(self) -> int:
        """Number of slots of a rank."""
        return int(self.experts.shape[1]) // self.ranks

    def rank_load(self, load: Numbers) -> F64:
        """Return the tokens of each rank, [L, ranks], if the tokens of each expert, [L, E], divide among its slots."""
        tokens = np.take_along_axis(load / self.counts, self.experts, axis=1)
        shares: F64 = tokens.reshape(len(tokens), self.ranks, -1).sum(axis=2)
        return shares


def expert_map(experts: Numbers, num_experts: int, ranks: int) -> ExpertMap:
    """Make the map of the experts [L, P] in the slots."""
    held = experts.astype(np.int32)
    layers, num_slots = held.shape
    assert num_slots % ranks == 0, f"{num_slots} slots do not divide among {ranks} ranks"
    line = np.arange(layers)[:, None]
    counts = np.bincount((line * num_experts + held).ravel(), minlength=layers * num_experts)
    counts = counts.reshape(layers, num_experts)
    assert counts.min() > 0, "an expert has no slot"
    order = np.argsort(held, axis=1, kind="stable")  # slots by expert
    sorted_experts = np.take_along_axis(held, order, axis=1)
    first = np.cumsum(counts, axis=1) - counts  # place of each expert's first slot in `order`
    slots = np.full((layers, num_experts, num_slots - num_experts + 1), -1, np.int32)
    slots[line, sorted_experts, np.arange(num_slots) - np.take_along_axis(first, sorted_experts, axis=1)] = order
    return ExpertMap(held, slots, counts.astype(np.int32), ranks)


def initial_map(
    num_layers: int, num_experts: int, num_redundant: int, ranks: int, *, in_turn: bool = False
) -> ExpertMap:
    """Return the map before any load is known: experts 0 to E - 1, then the first ones again.

    in_turn   True: these go to the ranks in turn; False: each rank has neighbours
    """
    held = np.arange(num_experts + num_redundant) % num_experts
    if in_turn:
        held = held.reshape(-1, ranks).T.ravel()
    return expert_map(np.tile(held, (num_layers, 1)), num_experts, ranks)


def even_nodes(hosts: Sequence[int]) -> int:
    """Return the number of hosts if each has as many neighbouring ranks, else 1. `hosts`: the host of each rank."""
    count = max(1, len(set(hosts)))
    each = len(hosts) // count
    even = each * count == len(hosts) and all(
        len(set(hosts[first : first + each])) == 1 for first in range(0, len(hosts), max(1, each))
    )
    return count if even else 1


# -- policy ----------------------------------------------------------------------------------------


def balanced_map(
    load: Numbers, num_redundant: int, ranks: int, *, groups: int = 1, nodes: int = 1, old: ExpertMap | None = None
) -> ExpertMap:
    """Return the map that balances the tokens of ranks for a load [L, E], the tokens of each expert.

    groups   groups of neighbouring experts among which a token's router chooses first
    nodes    hosts of the ranks, equally many each. If they divide the groups, the hierarchical policy keeps a group's
             experts and their copies on one node; else the global policy places every copy anywhere
    old      map in use: experts that stay on a rank keep their slot there
    """
    if groups % nodes:
        groups = nodes = 1
    layers, num_experts = load.shape
    num_slots = num_experts + num_redundant
    assert num_experts % groups == num_slots % ranks == ranks % nodes == 0
    size = num_experts // groups
    node, place = _pack(load.reshape(layers, groups, size).sum(axis=2), nodes)
    position = ((node * (groups // nodes) + place) * size)[:, :, None] + np.arange(size)
    by_node = np.argsort(position.reshape(layers, num_experts), axis=1)  # the experts in the order of nodes
    on_node = np.take_along_axis(load, by_node, axis=1).reshape(layers * nodes, num_experts // nodes)
    copied, counts = _replicate(on_node, num_slots // nodes)
    rank, place = _pack(np.take_along_axis(on_node / counts, copied, axis=1), ranks // nodes)
    placed = np.empty_like(copied)
    np.put_along_axis(placed, rank * (num_slots // ranks) + place, copied, axis=1)
    placed = placed.reshape(layers, nodes, -1) + np.arange(nodes)[:, None] * (num_experts // nodes)
    held = np.take_along_axis(by_node, placed.reshape(layers, num_slots), axis=1)
    return expert_map(held if old is None else _keep_slots(old.experts, held, ranks), num_experts, ranks)


def _pack(weights: Numbers, packs: int) -> tuple[I64, I64]:
    """Return the pack of each item and its place in the pack, both [n, items], for the weights [n, items].

    The heaviest item goes first. Each goes to the lightest pack that has room; all packs get equally many.
    """
    lines, items = weights.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (lines, 1)), np.zeros((lines, items), np.int64)
    line = np.arange(lines)
    pack, place = np.empty((2, lines, items), np.int64)
    loads, filled = np.zeros((lines, packs)), np.zeros((lines, packs), np.int64)
    for item in np.argsort(-weights.astype(np.float64), axis=1, kind="stable").T:
        to = np.where(filled < room, loads, np.inf).argmin(axis=1)
        pack[line, item] = to
        place[line, item] = filled[line, to]
        filled[line, to] += 1
        loads[line, to] += weights[line, item]
    return pack, place


def _replicate(load: Numbers, total: int) -> tuple[I64, I64]:
    """Return the experts of `total` slots, [n, total], and the slots of each expert, [n, m], for the load [n, m].

    Every expert has a slot. Each further slot goes to the expert with the most tokens per slot.
    """
    lines, experts = load.shape
    line = np.arange(lines)
    held = np.tile(np.arange(total), (lines, 1))
    counts = np.ones((lines, experts), np.int64)
    for slot in range(experts, total):
        hottest = (load / counts).argmax(axis=1)
        held[:, slot] = hottest
        counts[line, hottest] += 1
    return held, counts


def _keep_slots(old: I32, new: I64, ranks: int) -> I64:
    """Reorder the experts `new` [L, P] within each rank: experts that it has in `old` [L, P] stay in their slots."""
    shape = (len(old), ranks, -1)
    before, after = old.reshape(shape), new.reshape(shape)
    same = before[..., :, None] == after[..., None, :]
    same &= _occurrence(before)[..., :, None] == _occurrence(after)[..., None, :]
    kept, stays = same.any(axis=3), same.any(axis=2)  # slots of `before`, and of `after`; equally many of each rank
    held = before.astype(np.int64)
    held[~kept] = after[~stays]
    return held.reshape(new.shape)


def _occurrence(experts: Numbers) -> I64:
    """Return how many earlier slots of the rank hold the same expert, for experts [L, ranks, slots]."""
    equal = experts[..., :, None] == experts[..., None, :]
    earlier: I64 = np.tril(equal, -1).sum(axis=3)
    return earlier


# -- moves -----------------------------------------------------------------------------------------


def moves(old: ExpertMap, new: ExpertMap) -> list[list[tuple[int, int]]]:
    """Return (destination slot, source slot) of the weights to move, of each layer.

    A source is a slot of the OLD map, so all sources are read before any destination is written. It is on the rank
    of the destination if that rank has the expert, else on the rank that sends least in this layer.
    """
    assert old.experts.shape == new.experts.shape and old.ranks == new.ranks
    ranks, each = old.ranks, old.each
    found = []
    for layer, (before, after) in enumerate(zip(old.experts, new.experts, strict=True)):
        sent = [0] * ranks
        steps = []
        for slot in np.flatnonzero(before != after).tolist():
            home, expert = slot // each, after[slot]
            sources = old.slots[layer, expert, : old.counts[layer, expert]].tolist()
            _, _, _, source = min(
                (one // each != home, sent[one // each], (one // each - home) % ranks, one) for one in sources
            )
            sent[source // each] += source // each != home
            steps.append((slot, source))
        found.append(steps)
    return found


# -- load ------------------------------------------------------------------------------------------


def balancedness(load: Numbers, experts: ExpertMap) -> float:
    """Return the mean of the ranks' tokens over the maximum, both summed over layers; 1.0: balanced, or no tokens.

    load   [L, E]: tokens of each expert
    """
    tokens = experts.rank_load(load)
    most = float(tokens.max(axis=1).sum())
    return float(tokens.mean(axis=1).sum()) / most if most else 1.0

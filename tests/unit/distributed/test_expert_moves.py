"""Moves of experts' weights between simulated ranks, and the choice of a copy on the device."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.distributed.expert_moves import ExpertMover, ExpertRanks
from quire.engine.eplb import balanced_map, initial_map, moves
from quire.kernels.expert_copies.expert_memory import expert_memory, let_move
from quire.kernels.expert_copies.slots import ExpertSlots, initial_slots
from quire.kernels.experts import panels
from quire.kernels.experts.form import ExpertForm
from quire.kernels.native import library
from quire.kernels.pack.matrix import QuantizedMatrix

from ...support.expert_copies import choose
from ...support.fake_streams import fake_streams
from ...support.simulated_groups import SimulatedGroup, SimulatedRanks

LAYERS, EXPERTS, REDUNDANT = 2, 6, 2


def every(group: SimulatedGroup) -> ExpertRanks:
    """Return the ranks of a group, all of which divide the experts."""
    return ExpertRanks(group, tuple(range(group.size)))


def weights(layer: int, expert: int) -> list[Tensor]:
    """Two tensors of an expert, unlike those of all others."""
    return [torch.full((3,), 100.0 * layer + expert), torch.full((2, 2), layer + 10 * expert, dtype=torch.int8)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_slot_gets_the_weights_of_its_new_expert(ranks: int) -> None:
    old = initial_map(LAYERS, EXPERTS, REDUNDANT, ranks)
    load = np.array([[1, 2, 90, 4, 5, 6], [60, 50, 4, 3, 2, 1]])
    new = balanced_map(load, REDUNDANT, ranks, old=old)
    steps = moves(old, new)
    assert all(steps)

    def work(group: SimulatedGroup) -> list[list[list[Tensor]]]:
        own = slice(group.rank * old.each, (group.rank + 1) * old.each)
        held = [[weights(layer, expert) for expert in old.experts[layer, own]] for layer in range(LAYERS)]
        mover = ExpertMover(every(group), lambda layer, place: held[layer][place], old.each)
        mover.begin(steps)
        for layer in range(LAYERS):
            while mover.told <= layer:
                time.sleep(0.001)
            mover.switch(layer)
        assert mover.ready == LAYERS and mover.fault is None
        return held

    for rank, held in enumerate(SimulatedRanks(ranks).run(work)):
        for layer in range(LAYERS):
            for place, found in enumerate(held[layer]):
                right = weights(layer, int(new.experts[layer, rank * old.each + place]))
                assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


def matrix(rows: int, columns: int, scale: float | None, seed: int) -> QuantizedMatrix:
    """A random matrix of 8-bit integers with the same scale for all rows, or a random one for each."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.rand(rows, 1, generator=random) + 0.1 if scale is None else torch.full((rows, 1), scale)
    values = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=random)
    return QuantizedMatrix(Scheme(values="int8", block=(1, 0), inputs="token"), values, scales)


def nvfp4_matrix(rows: int, columns: int, factor: float | None, seed: int) -> QuantizedMatrix:
    """A random matrix of NVFP4 with the same factor for all rows, or a random one for each."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=random)
    scale = torch.randint(0, 127, (rows, columns // 16), dtype=torch.uint8, generator=random)
    factors = torch.rand(rows, 1, generator=random) + 0.1 if factor is None else torch.full((rows, 1), factor)
    scheme = Scheme(values="e2m1", block=(1, 16), factor=True)
    return QuantizedMatrix(scheme, values, scale.view(torch.float8_e4m3fn), factor=factors).check()


@pytest.mark.skipif(bool(library.missing()), reason=library.missing())
@pytest.mark.parametrize("make", [matrix, nvfp4_matrix])
def test_quantized_experts_with_scales_of_different_types_move_to_each_other_s_places(
    make: Callable[[int, int, float | None, int], QuantizedMatrix],
) -> None:
    """Their biases, too. float16 holds 2^-6 and 2^-20 exactly, not 3e5 and 1e-9; others round."""
    hidden, width, scales = 16, 32, [2.0**-6, None, 3e5, 1e-9, 2.0**-20, None]
    experts = [
        (make(2 * width, hidden, scale, seed), make(hidden, width, scale, 50 + seed))
        for seed, scale in enumerate(scales)
    ]
    biases = torch.randn(6, 2 * width), torch.randn(6, hidden)
    x, weight = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1)), torch.ones(3, 1)

    def packed(held: list[int]) -> panels.Packed:
        made = panels.empty(len(held), *experts[0], torch.device("cpu"), ExpertForm("swiglu_oai", biased=True))
        for place, expert in enumerate(held):
            panels.put(made, place, *experts[expert], (biases[0][expert], biases[1][expert]))
        return made

    def answers(made: panels.Packed) -> list[Tensor]:
        return [panels.run(x, weight, torch.full((3, 1), place, dtype=torch.int32), made) for place in range(len(made))]

    plain = packed(list(range(6)))
    types = {made[0].quantized.scale.dtype for made in plain if made[0].quantized}
    assert types == ({torch.float16, torch.float32} if make is matrix else {torch.float8_e4m3fn})
    right = answers(plain)

    def work(group: SimulatedGroup) -> list[Tensor]:
        own = packed([3 * group.rank + place for place in range(3)])
        let_move(own)
        mover = ExpertMover(every(group), lambda layer, place: expert_memory(own, place), 3)
        mover.begin([[(slot, 5 - slot) for slot in range(6)]])
        while not mover.told:
            time.sleep(0.001)
            assert mover.fault is None
        mover.switch(0)
        return answers(own)

    found = [one for rank in SimulatedRanks(2).run(work) for one in rank]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, reversed(right), strict=True))


def test_a_layer_is_fetched_only_after_the_one_before_is_switched() -> None:
    """So the spare memory holds one layer, and no rank writes weights that another one still reads."""
    old = initial_map(LAYERS, EXPERTS, REDUNDANT, 2)
    steps = [[(0, 5)], [(0, 5)]]

    def work(group: SimulatedGroup) -> list[int]:
        held = [[weights(layer, expert) for expert in range(old.each)] for layer in range(LAYERS)]
        mover = ExpertMover(every(group), lambda layer, place: held[layer][place], old.each)
        mover.begin(steps)
        seen = []
        for layer in range(LAYERS):
            with mover._changed:
                mover._changed.wait_for(lambda layer=layer: mover.ready > layer, timeout=60)  # type: ignore[misc]
            threading.Event().wait(0.05)
            seen.append(mover.ready)
            mover.switch(layer)
        return seen

    assert SimulatedRanks(2).run(work) == [[1, 2], [1, 2]]


def test_on_a_gpu_weights_are_fetched_after_the_last_switch_and_switched_after_they_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So no copy reads weights, or reuses memory, that the main stream is still to write or read."""
    side, log = fake_streams(monkeypatch)
    held = [[torch.tensor([place]) for place in range(4)] for _ in range(LAYERS)]
    mover = ExpertMover(every(SimulatedRanks(1).groups[0]), lambda layer, place: held[layer][place], 4, side)  # type: ignore[arg-type]
    mover.begin([[(0, 1)]] * LAYERS)
    for layer in range(LAYERS):
        while mover.told <= layer:
            time.sleep(0.001)
            assert mover.fault is None
        mover.switch(layer)
    assert mover._thread is not None
    mover._thread.join(60)
    assert [words for words in log if words != "out of side"] == [
        "in side",
        *("the host waits for side", "side waits for main") * LAYERS,
    ]
    assert all(layer[0] == 1 for layer in held)


def test_a_fault_of_a_mover_is_kept_and_nothing_is_ready() -> None:
    def memory(layer: int, place: int) -> list[Tensor]:
        raise RuntimeError("no such memory")

    mover = ExpertMover(every(SimulatedRanks(1).groups[0]), memory, 4)
    mover.begin([[(0, 1)]])
    assert mover._thread is not None
    mover._thread.join(60)
    assert str(mover.fault) == "no such memory" and mover.ready == mover.told == 0


def test_every_rank_can_switch_when_the_first_one_tells() -> None:
    """No rank waits in a switch: that would hold up a step."""

    def work(group: SimulatedGroup) -> list[int]:
        held = [[weights(layer, expert) for expert in range(4)] for layer in range(LAYERS)]
        mover = ExpertMover(every(group), lambda layer, place: held[layer][place], 4)
        movers[group.rank] = mover
        mover.begin([[(0, 5)], [(4, 1)]])
        for layer in range(LAYERS):
            while mover.told <= layer:
                time.sleep(0.001)
            seen.append(min(one.ready for one in movers.values()))
            mover.switch(layer)
        return [mover.told]

    movers: dict[int, ExpertMover] = {}
    seen: list[int] = []
    assert SimulatedRanks(2).run(work) == [[2], [2]]
    assert sorted(seen) == [1, 1, 2, 2]


@pytest.mark.parametrize("first_row", [0, 100_003])
def test_slots_on_the_device_are_those_of_the_map(first_row: int) -> None:
    old = initial_map(1, EXPERTS, REDUNDANT, 2)
    new = balanced_map(np.array([[1, 2, 90, 4, 5, 6]]), REDUNDANT, 2, old=old)
    ids = torch.randint(0, EXPERTS, (200, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    layer = ExpertSlots(*initial_slots(EXPERTS, REDUNDANT), first_row=first_row)
    for one in (old, new):
        layer.replace(torch.from_numpy(one.slots[0]), torch.from_numpy(one.counts[0]))
        assert layer.choose(ids).tolist() == choose(one, 0, ids.numpy(), first_row).tolist()


def test_rows_without_experts_are_not_counted_and_have_no_slot() -> None:
    layer = ExpertSlots(*initial_slots(EXPERTS, REDUNDANT))
    layer.count(torch.tensor([[0, 1], [1, 5], [5, 5]]))
    layer.count(torch.tensor([[2, 2], [-1, -1]]))
    assert layer.load.tolist() == [1, 2, 2, 0, 0, 3]
    chosen = layer.choose(torch.tensor([[-1, -1], [4, -1]], dtype=torch.int32))
    assert chosen.dtype == torch.int32 and (chosen < 0).tolist() == [[True, True], [False, True]]

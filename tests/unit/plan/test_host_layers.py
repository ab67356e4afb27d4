"""The choice of layers whose weights lie in host memory."""

from dataclasses import dataclass

import pytest

from quire.contracts.errors import ConfigError
from quire.contracts.params import Param
from quire.plan.host_layers import HostLayers, choose_host_layers
from quire.plan.memory import GIB


def params(sizes: dict[int, float]) -> list[tuple[Param, int]]:
    """Return the parameters of layers with matrices of so many GiB, and others that stay on the device."""
    found = [(Param("embed.weight", (8, 4), ()), 9 * GIB)]
    for layer, size in sizes.items():
        found.append((Param(f"layers.{layer}.attention.norm.weight", (4,), ()), GIB))
        found.append((Param(f"layers.{layer}.attention.kv_up.weight", (8, 4), ()), GIB))
        found.append((Param(f"layers.{layer}.mlp.down.weight", (8, 4), ()), round(size * GIB / 2)))
        found.append((Param(f"layers.{layer}.mlp.experts.down", (8, 4), (), shard="experts"), round(size * GIB / 2)))
    return found


@dataclass
class Choice:
    """A size that is asked for, and the layers that are chosen, with the GiB of them and of their slots."""

    gib: float
    layers: tuple[int, ...]
    num_gib: float
    slot_gib: float


@pytest.mark.parametrize(
    "choice",
    [
        Choice(2.5, (3, 6, 9), 3, 2),
        Choice(3, (3, 6, 9), 3, 2),
        Choice(3.1, (2, 4, 7, 9), 4, 2),
        Choice(9.5, tuple(range(10)), 10, 2),
        Choice(100, tuple(range(10)), 10, 2),
    ],
)
def test_the_fewest_layers_that_have_as_much_are_spread(choice: Choice) -> None:
    sizes = dict.fromkeys(range(11), 1.0)  # layer 10 drafts
    found = choose_host_layers(params(sizes), range(10), choice.gib)
    assert found[:3] == (choice.layers, choice.num_gib * GIB, choice.slot_gib * GIB)
    assert found.saved == (choice.num_gib - choice.slot_gib) * GIB
    words = f"all {len(sizes) - 1} layers" if len(choice.layers) == 10 else f"{len(choice.layers)} layers of 10, evenly"
    assert found.reason.startswith(words)


def test_slots_hold_the_largest_layer_and_a_stage_has_its_own() -> None:
    sizes = {layer: 0.5 if layer < 8 else 2.0 for layer in range(12)}
    assert choose_host_layers(params(sizes), range(6, 12), 4.2)[:3] == ((7, 9, 11), 4.5 * GIB, 4 * GIB)


def test_none_is_asked_for() -> None:
    assert choose_host_layers(params({0: 1.0}), range(1), 0.0) == HostLayers()


@pytest.mark.parametrize(
    ("layers", "gib", "fix"), [(4, 2.0, r"use 3 or more, or leave it out\.$"), (2, 0.1, r"that: leave it out\.$")]
)
def test_memory_that_is_not_saved_is_refused_with_a_size_that_saves_some(layers: int, gib: float, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cpu_offload_gb={gib:g}: the weights of . layers? would lie.*{fix}"):
        choose_host_layers(params(dict.fromkeys(range(layers), 1.0)), range(layers), gib)

"""Layers whose weights lie in host memory (`--cpu-offload-gb`): which ones, their bytes, and the reason. No torch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.contracts.errors import ConfigError
from quire.contracts.params import Param
from quire.plan.linears import is_linear
from quire.plan.memory import GIB, as_gib

SLOTS = (
    2  # one layer computes from a slot while the next one comes to the other: a third would wait for the same copies
)


class HostLayers(NamedTuple):
    """Layers of a rank whose matrices lie in host memory. They come to slots of the device ahead of their use.

    layers      their numbers in the model
    num_bytes   bytes of their matrices, before packing
    slot_bytes  bytes of the slots of the device, each of which holds the largest of these layers
    reason      the reason for this choice
    """

    layers: tuple[int, ...] = ()
    num_bytes: int = 0
    slot_bytes: int = 0
    reason: str = ""

    @property
    def saved(self) -> int:
        """Bytes of the device's memory that the layers leave free."""
        return self.num_bytes - self.slot_bytes


def choose_host_layers(params: Iterable[tuple[Param, int]], layers: range, gib: float) -> HostLayers:
    """Choose the fewest layers, evenly spread, whose matrices have at least `gib` GiB; all layers if they have less.

    params   parameters of a rank, each with its bytes
    layers   numbers of the rank's layers; layers that draft are behind them, and stay on the device
    Raises ConfigError if the slots would take as much memory as the layers leave free.
    """
    if not gib:
        return HostLayers()
    sizes = dict.fromkeys(layers, 0)
    for param, num_bytes in params:
        layer = int(param.name.split(".")[1]) if param.name.startswith("layers.") else -1
        if layer in sizes and is_streamed(param):
            sizes[layer] += num_bytes
    every = [_of(sizes, _spread(layers, count)) for count in range(1, len(layers) + 1)]
    chosen = next((one for one in every if one.num_bytes >= gib * GIB), every[-1])
    if chosen.saved > 0:
        return chosen
    useful = next((one for one in every if one.saved > 0), None)
    fix = "leave it out" if useful is None else f"use {useful.num_bytes / GIB:.3g} or more, or leave it out"
    raise ConfigError(
        f"cpu_offload_gb={gib:g}: the weights of {_words(len(chosen.layers))} would lie in host memory, and the memory "
        f"of the device to which they come, {as_gib(chosen.slot_bytes)}, is as much as that: {fix}."
    )


def is_streamed(param: Param) -> bool:
    """Return True for parameters that lie in host memory: matrices of linear layers and of experts."""
    return is_linear(param) or param.shard == "experts"


def _spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` layers, evenly spread, the last one among them: so the first one has most time to come."""
    return tuple(layers[-(-(place + 1) * len(layers) // count) - 1] for place in range(count))


def _of(sizes: dict[int, int], chosen: tuple[int, ...]) -> HostLayers:
    """Return these layers with their bytes. sizes: bytes of each layer"""
    own, count = [sizes[layer] for layer in chosen], len(sizes)
    reason = (
        f"{_words(len(chosen))} of {count}, evenly spread, so that each is copied while the layers before it compute"
        if len(chosen) < count
        else f"all {count} layers"
    )
    return HostLayers(chosen, sum(own), min(SLOTS, len(own)) * max(own), reason)


def _words(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"

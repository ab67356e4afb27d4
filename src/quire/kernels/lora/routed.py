"""Adapters (LoRA) of routed experts, as the kernels of experts see them. `quire.layers.adapters` has the matrices.

An expert with an adapter is down @ act(gate_up @ x + d) + e, where d is the adapter's product with x, and e that with
the result of the activation. So gate_up, activation and down are products by themselves.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Routed = tuple[Tensor, Tensor, Tensor | None]  # weights [T, k], ids [T, k] and expert_map of `quire.kernels.experts`
Join = Callable[[], bool]  # `Fork.join`


class Between(Protocol):
    """Adds the products of adapters in place, to rows of one expert or of all pairs (token, chosen expert)."""

    def add_up(self, y: Tensor, x: Tensor) -> None:
        """Add to y [n, 2I], the product of gate and up. x: of the tokens [n, H], or of all pairs [T, H]"""

    def add_down(self, y: Tensor, h: Tensor, weights: Tensor | None = None) -> None:
        """Add to y [n, H], the product of down with h [n, I]. weights: [T, k] factors of the pairs; None: 1"""


class ExpertAdapters(Protocol):
    """Adapters of the rows of a step in the experts that a rank has of a layer."""

    @property
    def inner(self) -> int:
        """Numbers I between the products."""

    def of_expert(self, place: int, tokens: Tensor | None) -> Between:
        """Return the adapters of the expert at `place`, for tokens [n] int64; None: for all of the step."""

    def of_pairs(self, ids: Tensor, expert_map: Tensor | None) -> Between:
        """Return the adapters of all pairs [T * k], in their order, on a GPU. Does not wait for the device."""

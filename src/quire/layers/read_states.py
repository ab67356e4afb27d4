"""The states between layers that an EAGLE-3 head reads."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class ReadStates:
    """Keeps states of a step that a head reads: the inputs of some layers of the model, or the output of the last one.

        stage 0, layers 0 to 3    keeps the input of layer 2, and sends it on behind its output
        stage 1, layers 4 to 7    gets it, keeps the input of layer 5; the head reads both

    reads            numbers of the layers, in the head's order. The number of all layers: the output of the last one
    numbers, layers  the layers of this stage of a pipeline, and their numbers
    """

    def __init__(self, reads: Sequence[int], numbers: range, layers: Sequence[nn.Module]) -> None:
        self._states: list[Tensor | None] = [None] * len(reads)
        self._got, self._sent = (
            [place for place, layer in enumerate(reads) if layer < bound] for bound in (numbers.start, numbers.stop)
        )
        self._output = {place for place, layer in enumerate(reads) if layer == numbers.stop}  # on the last stage
        for place, layer in enumerate(reads):
            if layer in numbers:
                layers[numbers.index(layer)].register_forward_pre_hook(partial(self._keep, place))

    @property
    def num_got(self) -> int:
        """Number of states [T, hidden] that come from the stage before."""
        return len(self._got)

    def give(self, states: Tensor) -> None:
        """Keep the states [num_got, T, hidden] that came from the stage before."""
        for place, state in zip(self._got, states, strict=True):
            self._states[place] = state

    def behind(self, hidden: Tensor) -> Tensor:
        """Return the output [T, hidden] of this stage's layers with the states for the next stage, [1 + n, T, hidden].

        The states of the step are forgotten.
        """
        return torch.stack([hidden, *self._taken(self._sent, hidden)])

    def taken(self, hidden: Tensor) -> list[Tensor]:
        """Return all states [T, hidden] of the step, on the last stage, and forget them. hidden: its output"""
        return self._taken(range(len(self._states)), hidden)

    def spread(self, rows: Tensor, count: int) -> None:
        """Give states of layers that ran for `rows` [K] alone the places of their rows, among `count`; others are 0."""
        for place, state in enumerate(self._states):
            if state is not None and len(state) < count:
                self._states[place] = state.new_zeros(count, state.shape[1]).index_copy_(0, rows, state)

    def _taken(self, places: Sequence[int], hidden: Tensor) -> list[Tensor]:
        found = [hidden if place in self._output else self._states[place] for place in places]
        self._states = [None] * len(self._states)
        return [state for state in found if state is not None]

    def _keep(self, place: int, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._states[place] = given[0].clone()  # the layer may write over it

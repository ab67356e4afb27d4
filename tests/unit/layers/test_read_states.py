"""States that an EAGLE-3 head reads are the same in a pipeline, whichever stage has their layers."""

import pytest
import torch
from torch import Tensor, nn

from quire.layers.read_states import ReadStates

LAYERS = 6


class InPlace(nn.Module):
    """A layer that writes over its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(2).add_(self.number)


def run(reads: tuple[int, ...], ends: tuple[int, ...]) -> list[Tensor]:
    """The states that the head reads, behind stages that end at these layers."""
    hidden, came = torch.arange(6.0).view(3, 2), None
    for first, end in zip((0, *ends), ends, strict=False):
        layers = [InPlace(number) for number in range(first, end)]
        states = ReadStates(reads, range(first, end), layers)
        if came is not None:
            assert len(came) == 1 + states.num_got
            states.give(came[1:])
        for layer in layers:
            hidden = layer(hidden)
        if end == LAYERS:
            return states.taken(hidden)
        came = states.behind(hidden)
        hidden = came[0].clone()
    raise AssertionError


@pytest.mark.parametrize("reads", [(2, 3, 3), (5, 0, 2), (1, 4, LAYERS)])
@pytest.mark.parametrize("ends", [(3, 6), (2, 4, 6), (1, 5, 6)])
def test_stages_pass_on_what_the_head_reads(reads: tuple[int, ...], ends: tuple[int, ...]) -> None:
    for found, expected in zip(run(reads, ends), run(reads, (LAYERS,)), strict=True):
        assert torch.equal(found, expected)

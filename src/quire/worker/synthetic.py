"""Synthetic acceptance: a fixed share of the drafts counts, right or wrong. For measurements of speed only."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.step import NUM_DECODES, StepBuffers, StepWords, Tables
from quire.layers.context import StepContext
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape

GOLDEN = 0.6180339887498949  # multiples, modulo 1, are spread evenly over 0 to 1


class SyntheticAcceptance(StepFeature):
    """Makes drafts right or wrong after the sampling, so that runs have the lengths that were asked for.

    Launches have constant shapes for a number of rows and read no value on the host, so they can be captured.

    shares   shares of the runs in which the first draft counts, the first two, ...
    rows     most sampled rows of a step
    """

    def __init__(self, shares: tuple[float, ...], rows: int, device: torch.device) -> None:
        self._shares = torch.tensor(shares, dtype=torch.float64, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context without dead rows: a row without a draft counts as well."""
        return replace(ctx, live=None)

    def sampled(self, step: StepWords, tables: Tables, buffers: StepBuffers, tokens: Tensor, rows: int) -> None:
        """Overwrite the drafts of the first `rows` rows: with the token that was sampled, or with another one.

        Rows without a draft behind them, and slots whose drafts come from the host, stay as they are.
        """
        place, ends = self._rows[:rows], step.starts[1:]
        sequence = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
        within = (place - step.starts[sequence]).long()
        drafted = (sequence < step.words[NUM_DECODES]) & (place + 1 < ends[sequence])
        drafted &= tables.hosted[buffers.sample_slots[:rows]] == 0
        self._steps += 1
        chance = (GOLDEN * (self._steps + sequence)) % 1
        right = chance < self._shares[within.clamp(max=len(self._shares) - 1)]
        drafts, found = buffers.drafts[:rows], tokens[:rows]
        drafts.copy_(torch.where(drafted, torch.where(right, found, found ^ 1), drafts))

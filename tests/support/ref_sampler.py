"""The sampler with PyTorch's operations over slots with histories: what tests compare others with."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32, RowLogprobs
from quire.kernels.sampling import ref
from quire.kernels.sampling.sampler import CODES, Sampler
from quire.kernels.sampling.table import SamplingTable
from quire.kernels.step.upload import InPlaceUpload

CPU = torch.device("cpu")


class Sampled(NamedTuple):
    """tokens [R] int64 and codes [R] uint8."""

    tokens: Tensor
    codes: Tensor

    @property
    def failed(self) -> dict[int, str]:
        """Row -> why."""
        return {row: CODES[code] for row, code in enumerate(self.codes.tolist()) if code}


class RefSampler:
    """A table of parameters, and a history [num_slots, length] int32 of which a slot knows `lengths`."""

    def __init__(self, num_slots: int, vocab: int, length: int) -> None:
        self.table = SamplingTable(num_slots, vocab, CPU)
        self.history = torch.zeros((num_slots, length), dtype=torch.int32)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64)
        self.specs: dict[int, SamplerSpec] = {}

    def admit(self, slot: int, spec: SamplerSpec, tokens: Sequence[int] | I32) -> None:
        """A request takes `slot` with the tokens it has so far."""
        InPlaceUpload.write(self.table.admit(slot, spec))
        self.history[slot, : len(tokens)] = torch.from_numpy(np.array(tokens, np.int32))
        self.lengths[slot], self.specs[slot] = len(tokens), spec

    def release(self, slot: int) -> None:
        """The request leaves."""
        self.table.release(slot)
        self.lengths[slot] = 0

    def append(self, slot: int, token: int) -> None:
        """A slot goes on."""
        self.history[slot, self.lengths[slot]] = token
        self.lengths[slot] += 1

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, masks: Mapping[int, I32] | None = None
    ) -> Sampled:
        """Draw one token for each row; masks  slot -> words."""
        sampler = self._sampler(slots, positions)
        if masks:
            sampler.take_masks(
                slots.numpy().astype(np.int32), np.array(list(masks), np.int32), np.stack(list(masks.values()))
            )
        sampler.sample(logits, self.table.mode(slots.numpy().astype(np.int32)))
        return Sampled(sampler.tokens, sampler.codes)

    def logprobs(self, logits: Tensor, slots: Tensor, tokens: Tensor) -> dict[int, RowLogprobs]:
        """Of tokens that were drawn for these rows."""
        sampler = self._sampler(slots, slots)
        sampler.operations.tokens = tokens
        found = sampler.logprobs(logits, slots.numpy().astype(np.int32))
        return found()["logprobs"] if found else {}

    def _sampler(self, slots: Tensor, positions: Tensor) -> Sampler:
        made = ref.operations(len(slots), len(self.history), CPU)
        return Sampler(made, self.table, slots, positions, self.history)

"""What the sampler knows of each slot: parameters, edits and the token history, for as long as a request holds it.

Rows of the tables are slots. Columns live on the device and are gathered by the rows of a batch; what decides which
path a row takes lives on the host. Knows nothing of plans, KV blocks or the model.
"""

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import COLDEST, GREEDY_BELOW, SamplerSpec
from quire.contracts.step import I32
from quire.kernels.sampling.draw import Filters
from quire.kernels.sampling.edits import Penalties, RowEdits
from quire.kernels.sampling.noise import SAMPLE, NoiseKey

# Columns of SamplingTable.numbers.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE, _NUM_PROMPT, _COLUMNS = range(9)


class Needs(IntFlag):
    """What a slot's rows have to go through; 0 is greedy on raw logits."""

    NOISE = 1
    FILTERS = 2
    EDITS = 4
    PENALTIES = 8
    GRAMMAR = 16


class SamplingTable:
    """Per-slot sampling state.

    history   [num_slots, max_model_len] int32: token ids by position, prompt and output; memory is touched as it fills
    length    [num_slots] int64: how many of them are known
    needs     one `Needs` per slot, on the host;  edits  of the slots that have any
    specs     the admitted specs by slot, for what only the host reads (logprobs)
    """

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, device: str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.history = torch.empty((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.length = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.numbers = torch.ones((num_slots, _COLUMNS), dtype=torch.float64, device=device)
        self.needs = [Needs(0)] * num_slots
        self.edits: dict[int, RowEdits] = {}
        self.specs: dict[int, SamplerSpec] = {}

    def admit(self, slot: int, spec: SamplerSpec, token_ids: I32) -> None:
        """A request takes `slot` with the tokens it has so far: its prompt and, when resumed, its own output."""
        known = len(token_ids)
        self.history[slot, :known] = torch.from_numpy(np.ascontiguousarray(token_ids, np.int32).copy())
        self.length[slot] = known
        self.seeds[slot] = spec.seed - (1 << 64) if spec.seed >> 63 else spec.seed
        self.numbers[slot] = torch.tensor(_numbers(spec), dtype=torch.float64)
        self.specs[slot] = spec
        self.needs[slot] = needs_of(spec)
        self.edits.pop(slot, None)
        if self.needs[slot] & Needs.EDITS:
            self.edits[slot] = self._edits(spec)

    def release(self, slot: int) -> None:
        """The request leaves; the slot's rows count as greedy until the next one comes."""
        self.specs.pop(slot, None)
        self.edits.pop(slot, None)
        self.needs[slot] = Needs(0)
        self.length[slot] = 0

    def append(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Remember sampled tokens [R] at `positions` [R] < max_model_len of `slots` [R], each slot once."""
        self.history[slots, positions] = tokens.to(torch.int32)
        self.length[slots] = positions + 1

    def key(self, slots: Tensor, positions: Tensor, stream: int = SAMPLE) -> NoiseKey:
        """The noise keys of rows with these slots and positions."""
        return NoiseKey(self.seeds[slots], positions, stream)

    def filters(self, slots: Tensor) -> Filters:
        """The rows' temperature, top-k, top-p and min-p."""
        rows = self.numbers[slots]
        return Filters(rows[:, _TEMPERATURE].float(), rows[:, _TOP_K].long(), rows[:, _TOP_P], rows[:, _MIN_P])

    def penalties(self, slots: Tensor) -> tuple[Penalties, Tensor]:
        """The rows' penalties and prompt lengths [R] int64."""
        rows = self.numbers[slots]
        numbers = rows[:, [_REPETITION, _FREQUENCY, _PRESENCE]].float()
        return Penalties(numbers[:, 0], numbers[:, 1], numbers[:, 2]), rows[:, _NUM_PROMPT].long()

    def _edits(self, spec: SamplerSpec) -> RowEdits:
        """Ids outside the vocabulary are left out: they can neither come nor be kept from coming."""
        bias = {token: value for token, value in spec.logit_bias if self._inside(token)}
        return RowEdits(
            allowed=self._ids(spec.allowed_ids) if spec.allowed_ids else None,
            bad_words=tuple(word for word in spec.bad_words if word and self._inside(word[-1])),
            stop_ids=self._ids(spec.stop_ids),
            min_length=spec.min_length,
            bias_ids=self._ids(tuple(bias)),
            bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=self.device),
        )

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([i for i in ids if self._inside(i)], dtype=torch.int64, device=self.device)

    def _inside(self, token: int) -> bool:
        return 0 <= token < self.vocab_size


def _numbers(spec: SamplerSpec) -> list[float]:
    """In the order of the columns."""
    return [max(spec.temperature, COLDEST), max(spec.top_k, 0), spec.top_p, spec.min_p, spec.repetition_penalty,
            spec.frequency_penalty, spec.presence_penalty, spec.num_prompt]


def needs_of(spec: SamplerSpec) -> Needs:
    """What the rows of a request have to go through."""
    needs = Needs(0)
    if spec.temperature >= GREEDY_BELOW:
        needs |= Needs.NOISE
        if spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0:
            needs |= Needs.FILTERS
    if spec.logit_bias or spec.allowed_ids or spec.bad_words or (spec.stop_ids and spec.min_length > spec.num_prompt):
        needs |= Needs.EDITS
    if spec.repetition_penalty != 1.0 or spec.frequency_penalty or spec.presence_penalty:
        needs |= Needs.PENALTIES
    return needs | Needs.GRAMMAR if spec.grammar else needs

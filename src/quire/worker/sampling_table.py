"""What is known of each slot for sampling: parameters and edits on the device, needs and specs on the host.

Rows of the table are slots, for as long as a request holds one. Knows nothing of plans, KV blocks or the model.
"""

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32
from quire.kernels.sampling.rows import ROW_WORDS, Mode, Needs, encode_edits, encode_row, mode_of, needs_of
from quire.worker.upload import Change


class SamplingTable:
    """Per-slot sampling state.

    rows    [num_slots, ROW_WORDS] int32 on the device, see kernels/sampling/rows.py
    edits   slot -> words on the device, of the slots that have any
    scored  slot -> spec, of the slots that want log-probabilities of what they sample

    Edits lie in tensors of their own, whose addresses are in the rows: no pool can be too small, and memory goes back
    to PyTorch's allocator. It may be given to the next slot while a launched step still reads it, which is sound as
    long as that slot's words are written by the same stream.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.rows = torch.zeros((num_slots, ROW_WORDS), dtype=torch.int32, device=device)
        self.edits: dict[int, Tensor] = {}
        self.scored: dict[int, SamplerSpec] = {}
        self._needs = np.zeros(num_slots, np.uint8)
        self._vocab_size = vocab_size

    def admit(self, slot: int, spec: SamplerSpec) -> list[Change]:
        """A request takes `slot`; what has to be written on the device before its first row is sampled."""
        self.release(slot)
        needs = needs_of(spec)
        self._needs[slot] = needs
        if spec.num_logprobs is not None or spec.logprob_ids:
            self.scored[slot] = spec
        changes: list[Change] = []
        address = 0
        if needs & Needs.EDITS:
            words = encode_edits(spec, self._vocab_size)
            self.edits[slot] = torch.empty(len(words), dtype=torch.int32, device=self.rows.device)
            address = self.edits[slot].data_ptr()
            changes.append(Change(self.edits[slot], 0, words))
        return [*changes, Change(self.rows, ROW_WORDS * slot, encode_row(spec, address))]

    def release(self, slot: int) -> None:
        """The request leaves; its row on the device is stale until the next one comes."""
        self._needs[slot] = 0
        self.edits.pop(slot, None)
        self.scored.pop(slot, None)

    def mode(self, slots: I32) -> Mode:
        """The least that serves rows of these slots."""
        return mode_of(int(np.bitwise_or.reduce(self._needs[slots], initial=0)))

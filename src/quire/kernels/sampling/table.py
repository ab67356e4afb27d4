"""The sampling state of each slot: parameters and logit edits on the device, needs and specs on the host.

A row of the table is a slot. Knows nothing of plans, KV blocks or the model.
"""

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32
from quire.kernels.sampling.rows import ROW_WORDS, Mode, Needs, encode_edits, encode_row, mode_of, needs_of
from quire.kernels.step.upload import Change


class SamplingTable:
    """Sampling parameters of every slot.

    rows    [num_slots, ROW_WORDS] int32 on the device: parameters by slot, see kernels/sampling/rows.py
    edits   slot -> its logit edits (masks, bias) as int32 words on the device; only slots with edits
    scored  slot -> its request's `SamplerSpec`; only slots that ask for log-probabilities of sampled tokens

    Each slot's edits lie in a tensor of their own, and the slot's row holds the address of the tensor. So there is no
    pool that could be too small. PyTorch's allocator may reuse a freed tensor while a launched step still reads it.
    This is safe: the same stream writes the new words, after that step.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.rows = torch.zeros((num_slots, ROW_WORDS), dtype=torch.int32, device=device)
        self.edits: dict[int, Tensor] = {}
        self.scored: dict[int, SamplerSpec] = {}
        self._needs = np.zeros(num_slots, np.uint8)
        self._vocab_size = vocab_size

    def admit(self, slot: int, spec: SamplerSpec) -> list[Change]:
        """Set the parameters of `slot` for a request. Return the table changes to write before the request samples."""
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
        """Forget the request of a slot. The slot's row on the device keeps its old words until the next `admit`."""
        self._needs[slot] = 0
        self.edits.pop(slot, None)
        self.scored.pop(slot, None)

    def mode(self, slots: I32) -> Mode:
        """Return the cheapest sampling mode (such as greedy) that serves the requests in these slots."""
        return mode_of(int(np.bitwise_or.reduce(self._needs[slots], initial=0)))

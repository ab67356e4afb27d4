"""The tables of the running requests: one row per slot, on the device, for a request's whole life there."""

import numpy as np
import torch

from quire.contracts.step import StepPlan
from quire.worker.sampling_table import SamplingTable


class SlotTables:
    """Rows never move; a batch is a gather.

    block_table  [num_slots, max_blocks] int32
    computed     [num_slots] int64, tokens whose KV is written: the device owns lengths
    num_blocks   [num_slots] blocks in the row of `block_table`
    sampling     parameters and token history of the same slots
    """

    def __init__(self, sampling: SamplingTable, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.sampling = sampling
        self.block_table = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self.computed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_blocks = np.zeros(num_slots, np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables to the state that the plan's forward pass expects."""
        for slot in plan.released.tolist():
            self.sampling.release(slot)
            self.num_blocks[slot] = 0
        for a in plan.admitted:
            blocks = torch.from_numpy(a.block_ids[0])
            self.block_table[a.slot, : len(blocks)] = blocks
            self.num_blocks[a.slot] = len(blocks)
            self.computed[a.slot] = a.num_computed
            self.sampling.admit(a.slot, a.sampler, a.token_ids)
        for slot, _group, block in plan.appended.tolist():
            self.block_table[slot, self.num_blocks[slot]] = block
            self.num_blocks[slot] += 1

    def advance(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """`slots` [S] have now computed `lengths` [S] tokens."""
        self.computed[slots] = lengths

"""The tables of the running requests: one row per slot, on the device, for a request's whole life there."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.attention import Prompt
from quire.kernels.step import StepBuffers, Tables
from quire.worker.sampling_table import SamplingTable
from quire.worker.upload import Change


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that buffers are made for.

    graph_sizes    sequences of the decode steps that are captured, ascending
    graph_tokens   tokens of the other steps whose layers are captured, ascending
    depth          steps that may be launched and not collected
    windows        of the KV groups: tokens that a row sees, None for all
    """

    num_slots: int
    max_tokens: int
    max_model_len: int
    block_size: int
    graph_sizes: tuple[int, ...] = ()
    graph_tokens: tuple[int, ...] = ()
    depth: int = 1
    windows: tuple[int | None, ...] = (None,)

    @property
    def max_rows(self) -> int:
        """Rows of a step that are sampled, at most: one of each sequence."""
        return self.num_slots


class DeviceState:
    """Rows never move; a batch is a gather. The last slot of each table is for padding.

    windows    of the KV groups
    tables     block tables, lengths and histories, and `sampling` parameters
    buffers    what steps of the largest size read
    lengths    [num_slots + 1] int64 on the host: tokens computed once everything submitted is, an upper bound
    """

    def __init__(self, limits: Limits, vocab_size: int, device: torch.device) -> None:
        self.windows, slots = limits.windows, limits.num_slots + 1
        groups, self._max_blocks = len(limits.windows), -(-limits.max_model_len // limits.block_size) + 1
        self.tables = Tables(
            block_tables=zeros(groups, slots, self._max_blocks, dtype=torch.int32, device=device),
            computed=zeros(slots, device=device),
            history=zeros(slots, limits.max_model_len, dtype=torch.int32, device=device),
            block_size=limits.block_size,
        )
        self.sampling = SamplingTable(slots, vocab_size, device)
        tokens, rows = limits.max_tokens, limits.max_rows
        self.buffers = StepBuffers(
            token_ids=zeros(tokens, device=device), positions=zeros(tokens, device=device),
            kv_slots=zeros(groups, tokens, device=device),
            seq_lens=zeros(limits.num_slots, dtype=torch.int32, device=device),
            sample_rows=zeros(rows, device=device), sample_slots=zeros(rows, device=device),
            sample_positions=zeros(rows, device=device),
        )  # fmt: skip
        self.lengths, self._num_blocks = np.zeros(slots, np.int64), np.zeros((groups, slots), np.int64)

    def apply(self, plan: StepPlan) -> list[Change]:
        """What a plan changes in the device's tables before its forward pass; lengths count the pass itself."""
        changes: list[Change] = []
        for slot in plan.released.tolist():
            self.sampling.release(slot)
        tables = self.tables
        for a in plan.admitted:
            tokens, self.lengths[a.slot] = np.ascontiguousarray(a.token_ids, np.int32), a.num_computed
            computed = np.array([a.num_computed], np.int64).view(np.int32)
            for group, blocks in enumerate(a.block_ids):
                self._num_blocks[group, a.slot] = 0
                changes.append(self._append(group, a.slot, np.ascontiguousarray(blocks, np.int32)))
            changes += (
                Change(tables.history, a.slot * tables.history.shape[1], tokens),
                Change(tables.computed, 2 * a.slot, computed),
                *self.sampling.admit(a.slot, a.sampler),
            )
        changes += [self._append(group, slot, np.array([block], np.int32))
                    for slot, group, block in plan.appended.tolist()]  # fmt: skip
        self.lengths[plan.slots] += plan.num_tokens
        return changes

    def _append(self, group: int, slot: int, blocks: I32) -> Change:
        """The change that puts blocks at the end of a slot's table."""
        tables, at = self.tables.block_tables, int(self._num_blocks[group, slot])
        self._num_blocks[group, slot] += len(blocks)
        return Change(tables, (group * tables.shape[1] + slot) * self._max_blocks + at, blocks)

    def most_blocks(self, slots: I32) -> int:
        """Blocks of the longest block table."""
        return int(self._num_blocks[:, slots].max())

    def prompts(self, plan: StepPlan) -> tuple[Prompt, ...]:
        """The sequences of an applied plan behind its decodes; of a prompt the host knows how much of it was computed
        before."""
        ends = np.cumsum(plan.num_tokens)
        starts, past = ends - plan.num_tokens, self.lengths[plan.slots] - plan.num_tokens
        return tuple((int(starts[s]), int(ends[s]), s, int(past[s])) for s in range(plan.num_decodes, len(ends)))


def zeros(*shape: int, dtype: torch.dtype = torch.int64, device: torch.device) -> Tensor:
    """A tensor of zeros. A CPU gives memory to it as it fills: a history is long, and most requests are short."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, str(dtype).removeprefix("torch.")))

"""From a plan and the slot tables to the tensors of one forward pass; nothing here needs a token's value."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.contracts.step import PROMPT_LOGPROBS, SAMPLE, StepPlan
from quire.worker.slots import SlotTables


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Tensors of one step: T tokens of S slots.

    token_ids, positions, kv_slots  [T] int64;  query_start  [S+1];  seq_lens [S] context including this step
    block_tables [S, max_blocks] int32 of the longest slot
    sample_rows  [N] token indices whose logits are sampled;  sample_slots [N];  sample_positions [N] = sequence length
    scored       (slot, first token index, number of rows, position of the first row) for prompt logprobs
    """

    slots: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    scored: list[tuple[int, int, int, int]]


def build_inputs(plan: StepPlan, tables: SlotTables, block_size: int) -> StepInputs:
    """Gather one step's inputs from the tables."""
    slots = torch.from_numpy(plan.slots.astype(np.int64))
    counts = torch.from_numpy(plan.num_tokens.astype(np.int64))
    start = tables.computed[slots]
    seq_lens = start + counts
    query_start = torch.zeros(len(slots) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=query_start[1:])
    row = torch.repeat_interleave(counts)  # which of the S slots a token belongs to
    positions = torch.arange(len(row)) - query_start[row] + start[row]
    token_slot = slots[row]
    blocks = tables.block_table[token_slot, positions // block_size].long()
    samples = torch.from_numpy((plan.outputs & SAMPLE) > 0)
    max_blocks = int(tables.num_blocks[plan.slots].max())
    return StepInputs(
        slots=slots,
        token_ids=tables.sampling.history[token_slot, positions].long(),
        positions=positions,
        kv_slots=blocks * block_size + positions % block_size,
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables.block_table[slots, :max_blocks],
        sample_rows=query_start[1:][samples] - 1,
        sample_slots=slots[samples],
        sample_positions=seq_lens[samples],
        scored=_scored(plan, query_start, start),
    )


def _scored(plan: StepPlan, query_start: torch.Tensor, start: torch.Tensor) -> list[tuple[int, int, int, int]]:
    scored = []
    for i in np.flatnonzero(plan.outputs & PROMPT_LOGPROBS).tolist():
        rows = int(plan.num_rows[i])
        skipped = int(plan.num_tokens[i]) - rows
        scored.append((int(plan.slots[i]), int(query_start[i]) + skipped, rows, int(start[i]) + skipped))
    return scored

"""From a plan and the slot tables to the tensors of one forward pass; nothing here needs a token's value."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.contracts.step import PROMPT_LOGPROBS, SAMPLE, StepPlan
from quire.worker.slots import SlotTables

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Tensors of one step: T tokens of S slots.

    token_ids, positions, kv_slots  [T] int64;  query_start  [S+1];  seq_lens [S] context including this step
    block_tables [S, max_blocks] int32 of the longest slot
    sample_rows  [N] token indices whose logits are sampled;  sample_slots [N];  sample_positions [N] = sequence length
    scored       (index in S, slot, first token index, number of rows up to the slot's last token) for prompt logprobs
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
    device = tables.computed.device
    slots = torch.from_numpy(plan.slots.astype(np.int64)).to(device)
    counts = torch.from_numpy(plan.num_tokens.astype(np.int64)).to(device)
    start = tables.computed[slots]
    seq_lens = start + counts
    bounds = np.concatenate(([0], np.cumsum(plan.num_tokens, dtype=np.int64)))
    query_start = torch.from_numpy(bounds).to(device)
    row = torch.repeat_interleave(counts, output_size=int(bounds[-1]))  # which of the S slots a token belongs to
    positions = torch.arange(len(row), device=device) - query_start[row] + start[row]
    token_slot = slots[row]
    blocks = tables.block_table[token_slot, positions // block_size].long()
    samples = torch.from_numpy(np.flatnonzero(plan.outputs & SAMPLE)).to(device)
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
        scored=_scored(plan, bounds),
    )


def _scored(plan: StepPlan, bounds: I64) -> list[tuple[int, int, int, int]]:
    scored = []
    for i in np.flatnonzero(plan.outputs & PROMPT_LOGPROBS).tolist():
        rows = int(plan.num_rows[i])
        scored.append((i, int(plan.slots[i]), int(bounds[i + 1]) - rows, rows))
    return scored

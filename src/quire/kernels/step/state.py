"""Device tables of the running requests: one row per slot, which a request keeps until it leaves."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan, most_drafts
from quire.kernels.attention import Prompt
from quire.kernels.sampling.table import SamplingTable
from quire.kernels.step import StepBuffers, Tables
from quire.kernels.step.upload import Change


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Exchanges of rows between replicas in lock-step.

    replicas   replicas in lock-step, this one included
    bounds     numbers of tokens of a replica for which an exchange is made, ascending; (): it is made for the exact
               numbers
    even       decode steps in graphs have one size on all replicas: see `GraphPlan`
    joint      the replicas share experts of the drafter's layers
    """

    replicas: int = 1
    bounds: tuple[int, ...] = ()
    even: bool = False
    joint: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that the runner's buffers are made for.

    num_slots       requests that can run at once
    max_tokens      most tokens of a step, drafts not counted
    num_drafts      most drafts that a decode verifies
    draft_lengths   numbers of drafts of a decode for which decode steps are captured, ascending
    max_model_len   most tokens of a sequence
    block_sizes     tokens of a KV block, by group
    graph_sizes     numbers of sequences for which decode steps are captured, ascending
    graph_tokens    numbers of tokens for which the layers of steps with prompts are captured, ascending
    depth           most steps that may be launched and not collected yet
    windows         sliding window of each KV group, in tokens; None: no window
    exchanges       exchanges with other replicas
    tiers           blocks of the KV cache are copied beside the steps
    adapters        steps with adapters are captured, too
    short           (sequences, tokens): decode steps of at most so many sequences are captured once more, for contexts
                    of at most so many tokens; (0, 0): none
    """

    num_slots: int
    max_tokens: int
    max_model_len: int
    block_sizes: tuple[int, ...]
    graph_sizes: tuple[int, ...] = ()
    graph_tokens: tuple[int, ...] = ()
    depth: int = 1
    windows: tuple[int | None, ...] = (None,)
    exchanges: Exchanges = Exchanges()
    num_drafts: int = 0
    draft_lengths: tuple[int, ...] = ()
    tiers: bool = False
    adapters: bool = False
    short: tuple[int, int] = (0, 0)

    @property
    def queries(self) -> tuple[int, ...]:
        """Numbers of tokens of a decode for which decode steps are captured, ascending."""
        return 1, *(1 + length for length in self.draft_lengths)

    @property
    def shared_size(self) -> int | None:
        """Tokens of a block in which shared prefixes are counted, see `KVGeometry.shared_size`; None: none are read."""
        return next((size for size, window in zip(self.block_sizes, self.windows, strict=True) if window is None), None)

    @property
    def captured_tokens(self) -> int:
        """Upper bound of the tokens of a captured step."""
        decodes = (size * query for size in self.graph_sizes for query in self.queries)
        return max((0, *self.graph_tokens, *decodes))

    @property
    def max_drafts(self) -> int:
        """Largest number of drafts of a step."""
        return most_drafts(self.num_slots, self.num_drafts)

    @property
    def step_tokens(self) -> int:
        """Largest number of tokens of a step, drafts included."""
        return self.max_tokens + self.max_drafts

    @property
    def max_rows(self) -> int:
        """Largest number of rows that a step samples: one per sequence, and one per draft."""
        return self.num_slots + self.max_drafts


class DeviceState:
    """Device tables of the running requests, with a row per slot, and the input buffers of a step.

    A request keeps its slot while it runs; each step gathers the rows of its requests. The last slot is for padding.

    windows    sliding window of each KV group, see `Limits`
    tables     block tables, numbers of computed tokens, and token ids of the requests (history)
    sampling   sampling parameters of the requests
    buffers    input tensors of a step, of the size of the largest step
    lengths    [num_slots + 1] int64 on the host: upper bound of each slot's computed tokens after all submitted steps
    """

    def __init__(self, limits: Limits, vocab_size: int, device: torch.device) -> None:
        self.windows, slots = limits.windows, limits.num_slots + 1
        groups, self._max_blocks = len(limits.windows), -(-limits.max_model_len // min(limits.block_sizes)) + 1
        self.tables = Tables(
            block_tables=zeros(groups, slots, self._max_blocks, dtype=torch.int32, device=device),
            computed=zeros(slots, device=device),
            history=zeros(slots, limits.max_model_len, dtype=torch.int32, device=device),
            hosted=zeros(slots, dtype=torch.int32, device=device),
            block_sizes=limits.block_sizes,
        )
        self.sampling = SamplingTable(slots, vocab_size, device)
        tokens, rows = limits.step_tokens, limits.max_rows
        self.buffers = StepBuffers(
            token_ids=zeros(tokens, device=device),
            positions=zeros(tokens, device=device),
            kv_slots=zeros(groups, tokens, device=device),
            live=zeros(tokens, dtype=torch.bool, device=device),
            seq_lens=zeros(limits.num_slots, dtype=torch.int32, device=device),
            sample_rows=zeros(rows, device=device),
            sample_slots=zeros(rows, device=device),
            sample_positions=zeros(rows, device=device),
            drafts=zeros(rows, dtype=torch.int32, device=device),
        )
        self.lengths, self._num_blocks = np.zeros(slots, np.int64), np.zeros((groups, slots), np.int64)

    def apply(self, plan: StepPlan) -> list[Change]:
        """Apply a plan to the state on the host. Return the device table changes to write before its forward pass.

        Afterwards `lengths` includes the tokens of this forward pass.
        """
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
                Change(tables.hosted, a.slot, np.array([a.sampler.grammar], np.int32)),
                *self.sampling.admit(a.slot, a.sampler),
            )
        changes += [
            self._append(group, slot, np.array([block], np.int32)) for slot, group, block in plan.appended.tolist()
        ]
        changes += [
            Change(
                tables.history,
                drafts.slot * tables.history.shape[1] + drafts.position,
                np.ascontiguousarray(drafts.tokens, np.int32),
            )
            for drafts in plan.drafts
        ]
        self.lengths[plan.slots] += plan.num_tokens
        return changes

    def _append(self, group: int, slot: int, blocks: I32) -> Change:
        """Return the change that appends blocks to a slot's block table."""
        tables, at = self.tables.block_tables, int(self._num_blocks[group, slot])
        self._num_blocks[group, slot] += len(blocks)
        return Change(tables, (group * tables.shape[1] + slot) * self._max_blocks + at, blocks)

    def most_blocks(self, slots: I32) -> int:
        """Return the most KV blocks that a request in these slots has, over all KV groups."""
        return int(self._num_blocks[:, slots].max())

    def longest(self, slots: I32) -> int:
        """Return an upper bound of the tokens of a request in these slots, one at least.

        `lengths` counts all drafts that were verified, blocks have room for those of a few steps.
        """
        return min(int(self.lengths[slots].max()), self.most_blocks(slots) * max(self.tables.block_sizes))

    def prompts(self, plan: StepPlan) -> tuple[Prompt, ...]:
        """Return a `Prompt` for each prompt chunk of an applied plan, in order.

        A `Prompt` is (first row, row after the last, index of the sequence in the step, tokens computed before).
        Decodes are left out: the host knows only an upper bound of their computed tokens.
        """
        ends = np.cumsum(plan.num_tokens)
        starts, past = ends - plan.num_tokens, self.lengths[plan.slots] - plan.num_tokens
        return tuple((int(starts[s]), int(ends[s]), s, int(past[s])) for s in range(plan.num_decodes, len(ends)))


def zeros(*shape: int, dtype: torch.dtype = torch.int64, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU, it takes physical memory only for the pages that are written.

    So the unused part of the token histories takes no memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, str(dtype).removeprefix("torch.")))

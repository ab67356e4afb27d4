"""The states that layers keep of requests: a layer's view of them, and what a step says about them.

A state has a fixed size, whatever the length of its request. The states of a device are rows of an arena. A running
request has the row of its slot; a row behind those of the slots holds a checkpoint: a copy at some length.

Contract of the kernels that update states: a sequence whose first row in the step is at position 0 starts from zeros,
whatever its row of the arena holds. So no row is cleared when a request takes it. A sequence without rows in the step,
as in the padding of a CUDA graph, reads and writes no state.

Kernels compute in float32, also where matrices are bfloat16: what they write is rounded to nearest, ties to even. The
output of a row is computed from the matrix before that is rounded. The reference, kernels of CPUs, and decodes round a
matrix behind each row, so that a state depends on its tokens, and not on the steps that computed them. Kernels that
take prompts in chunks round it at the end of a step, and where a copy is kept.

Where decodes verify drafts, a state has pending rows: the inputs of the last rows of its sequence, of which the next
step knows how many were accepted. It is then a state at length `at`, and pending row i is that of position at + i. With
room for P pending rows, a sequence of n rows in a step, behind `past` others, does this:

    replay   the first past - at pending rows go through the state (none if past = 0, where the state is zeros)
    n <= P   lazy: the state stays at `past`, and is written so; the outputs of the step's rows come from a copy, and
             these rows become the pending ones
    n > P    the step's rows go through the state, which is then at past + n, with no pending rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.attention import KVView


MATRICES = (torch.float32, torch.bfloat16)  # types of the matrices of heads


@dataclass(frozen=True)
class StateView:
    """The states of a layer, as views of the arena.

    columns   [rows, K - 1, C] the last inputs of a causal convolution over K tokens, the oldest first
    matrix    [rows, heads, key dim, value dim] float32 or bfloat16; None: the layer keeps columns alone
    pending   [rows, P, width] inputs of the last rows: those of the convolution, then others of the operation. None:
              no drafts are verified, and a state stands for all rows of a sequence
    at        [rows, 1] int32 length of the sequence at which columns and matrix stand; with `pending`
    """

    columns: Tensor
    matrix: Tensor | None = None
    pending: Tensor | None = None
    at: Tensor | None = None


NOTHING = StateView(torch.empty(0, 0, 0))  # of a layer without a mixer


@dataclass(frozen=True)
class BothViews:
    """The KV cache and the states of a layer that has attention and a recurrent mixer beside each other."""

    kv: KVView
    state: StateView

    @property
    def block_size(self) -> int:
        """Tokens of a block of its KV cache."""
        return self.kv.block_size


@dataclass
class StateMeta:
    """S sequences of a step, their T rows (tokens) and their states; the same for all layers.

    query_start   [S + 1] int32: rows query_start[s] .. query_start[s + 1] - 1 belong to sequence s
    seq_lens      [S] int32: length of each sequence, this step's tokens included
    slots         [S] int32: row of the arena with the sequence's state
    kept_at       [slots, 2] int32, by slot: lengths after which a copy of the slot's state is written to the rows
                  `kept` [slots, 2] int32 of the arena; 0: none. It counts in a step that computes the token before
                  it, also if the row is lazy: if it is not accepted, a later step computes that token again, and
                  writes the copy again. A copy has no pending rows
    max_rows      upper bound of the rows of a sequence, known to the host
    decode_rows   a sequence of at most this many rows is a decode; 0: all have chunks of prompts
    plans         scratch of the implementation: values derived from the fields above, once per step
    """

    query_start: Tensor
    seq_lens: Tensor
    slots: Tensor
    kept_at: Tensor
    kept: Tensor
    max_rows: int = 1
    decode_rows: int = 1
    plans: dict[object, object] = field(default_factory=dict)


def packed(states: Tensor) -> bool:
    """Return True if the numbers of each state are contiguous."""
    return states.stride()[1:] == states[:1].contiguous().stride()[1:]


class Course(NamedTuple):
    """The rows that go through the state of a sequence: pending ones that were accepted, then those of the step.

    slot, first   row of the arena with the state; index in the step of the sequence's first row there
    replayed      number of pending rows in front
    rows          [replayed + n, width] inputs of pending rows, then of the step's n rows
    inputs        [K - 1 + replayed + n, C] inputs of the convolution, and the ones before them
    lazy          True: the step's rows do not change the state
    copies        index of a row -> row of the arena that gets a copy of the state behind it
    """

    slot: int
    first: int
    replayed: int
    rows: Tensor
    inputs: Tensor
    lazy: bool
    copies: dict[int, int]

    def through(self, matrices: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each row's index, its index in the step, and the matrix in float32, which the caller updates in place.

        matrices   [rows, ...] of the arena. A copy is made after the caller's update. A pending row has index -1
        """
        matrix = matrices[self.slot]
        for i in range(len(self.rows)):
            if i == self.replayed and self.lazy:
                matrix = matrix.clone()
            wide = matrix.float()  # the matrix itself, if it is float32
            yield i, self.first + i - self.replayed if i >= self.replayed else -1, wide
            matrix.copy_(wide)
            if i in self.copies:
                matrices[self.copies[i]] = matrix


def courses(rows: Tensor, state: StateView, meta: StateMeta) -> Iterator[Course]:
    """Yield the course of each sequence with rows in the step, for references.

    rows   [T, width] inputs of the step's rows, as a pending row has them: those of the convolution, then others
    Clears the states of sequences that begin. Updates columns, lengths and pending rows, and the copies of columns.
    """
    starts, lengths, slots = (one.tolist() for one in (meta.query_start, meta.seq_lens, meta.slots))
    taps, channels = state.columns.shape[1:]
    for first, end, length, slot in zip(starts, starts[1:], lengths, slots, strict=False):
        if first == end:
            continue
        past, own = length - (end - first), rows[first:end]
        if past == 0:
            for one in (state.columns, state.matrix):
                if one is not None:
                    one[slot] = 0
        replayed, lazy = 0, False
        if state.pending is not None and state.at is not None:
            lazy = len(own) <= state.pending.shape[1]
            replayed = 0 if past == 0 else min(max(past - int(state.at[slot]), 0), state.pending.shape[1])
            own = torch.cat((state.pending[slot, :replayed], own))
            state.at[slot] = past if lazy else length
            if lazy:
                state.pending[slot, : end - first] = own[replayed:]
        inputs, copies = torch.cat((state.columns[slot], own[:, :channels])), dict[int, int]()
        for at, row in zip(meta.kept_at[slot].tolist(), meta.kept[slot].tolist(), strict=True):
            if past < at <= length:
                last = replayed + at - past
                copies[last - 1] = row
                state.columns[row] = inputs[last : last + taps]
                if state.at is not None:
                    state.at[row] = at
        stays = replayed if lazy else len(own)
        state.columns[slot] = inputs[stays : stays + taps]
        yield Course(slot, first, replayed, own, inputs, lazy, copies)


def convolved(inputs: Tensor, conv: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the causal convolution of inputs [K - 1 + n, C] by conv [K, C], [n, C] in float32; for references."""
    rows = len(inputs) - len(conv) + 1
    sums = sum(
        (inputs[k : k + rows].float() * conv[k] for k in range(len(conv))), inputs.new_zeros((), dtype=torch.float32)
    )
    return sums if bias is None else sums + bias

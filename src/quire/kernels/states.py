"""The states that layers keep of requests: a layer's view of them, and what a step says about them.

A state has a fixed size, whatever the length of its request. The states of a device are rows of an arena. A running
request has the row of its slot; a row behind those of the slots holds a checkpoint: a copy at some length.

Contract of the kernels that update states: a sequence whose first row in the step is at position 0 starts from zeros,
whatever its row of the arena holds. So no row is cleared when a request takes it. A sequence without rows in the step,
as in the padding of a CUDA graph, reads and writes no state.

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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.attention import KVView


@dataclass(frozen=True)
class StateView:
    """The states of a layer, as views of the arena.

    columns   [rows, K - 1, C] the last inputs of a causal convolution over K tokens, the oldest first
    matrix    [rows, heads, key dim, value dim] float32; None: the layer keeps columns alone
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


def copies(meta: StateMeta, s: int) -> dict[int, int]:
    """Return the copies that are due of a sequence: its rows in the step up to the copy -> row of the arena."""
    slot, past = int(meta.slots[s]), int(meta.seq_lens[s] - (meta.query_start[s + 1] - meta.query_start[s]))
    pairs = zip(meta.kept_at[slot].tolist(), meta.kept[slot].tolist(), strict=True)
    return {length - past: row for length, row in pairs if length > past}


def convolved(
    x: Tensor, conv: Tensor, bias: Tensor | None, columns: Tensor, meta: StateMeta
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each sequence in the step, and their causal convolution [n, C] in float32; for references.

    Updates the columns of the sequences. x [T, C], conv [K, C]
    """
    starts, taps = meta.query_start.tolist(), len(conv)
    for s, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        slot, rows = int(meta.slots[s]), end - first
        if not rows:
            continue
        if int(meta.seq_lens[s]) == rows:
            columns[slot] = 0
        inputs = torch.cat((columns[slot], x[first:end]))
        for at, row in copies(meta, s).items():
            if at <= rows:
                columns[row] = inputs[at : at + taps - 1]
        columns[slot] = inputs[rows:]
        sums = sum((inputs[k : k + rows].float() * conv[k] for k in range(taps)), torch.zeros((), device=x.device))
        yield slice(first, end), sums if bias is None else sums + bias

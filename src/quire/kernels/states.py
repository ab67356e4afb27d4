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

from dataclasses import dataclass, field

from torch import Tensor


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

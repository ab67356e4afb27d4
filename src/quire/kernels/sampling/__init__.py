"""Sampling: logits [R, V] and each row's parameters -> one token per row. Rows are not slots here.

    rows            a slot's parameters as int32 words, and what a batch needs of its rows      rows.py
    noise           keyed by (seed, position, stream, global vocabulary id); exact integers     noise.py
    edits           masks, bias, penalties, in place, before anything is drawn                  edits.py
    draw            greedy, plain and filtered paths; the same meaning, different cost          draw.py
    order           rows sorted by (value descending, id ascending)                             order.py
    logprobs        of raw logits                                                               logprobs.py
    specification   all of it for one row in float64, sorted and slow                           specification.py
    inputs          rows that break things: ties, flat, peaked, masked, tiny vocabularies       inputs.py
    ref, triton     the operations of a sampler, in PyTorch and for GPUs: `SamplerOperations`

Contract of every implementation: a row's token is a function of that row's logits, parameters, history and key alone.
Order: edits, penalties, temperature, min-p, top-k (keeps equals of the k-th), top-p (keeps the shortest sorted prefix
that reaches p, at least one; equals by ascending id), then argmax of value + Gumbel noise, lowest id among equals.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling.rows import Mode


@dataclass(frozen=True)
class Rows:
    """Whose logits they are, on the device: row -> slot -> parameters. Of R rows or more; the others are padding.

    slots, positions   [R] int64: a row's slot and the position of the token that is drawn
    table              [S, ROW_WORDS] int32, see rows.py;  history  [S, L] int32, read below a row's position
    edits              slot -> int32 words, see rows.py, of the slots that have any; their addresses are in the table
    """

    slots: Tensor
    positions: Tensor
    table: Tensor
    history: Tensor
    edits: Mapping[int, Tensor]


class SamplerOperations(Protocol):
    """What a sampler does on a device; made by `operations(max_rows, vocab, device)` of an implementation.

    tokens   [>= R] int64 that were drawn last;  codes  [>= R] uint8: 0, or why the row's token is 0 and means nothing:
             1 NaN or +inf in its raw logits, 2 nothing left to sample
    """

    tokens: Tensor
    codes: Tensor

    def take_masks(self, places: I32, masks: I32) -> None:
        """Masks [M, ceil(V / 32)] of the next rows, see `Executor.release`; places [R]: which of them is a row's, -1
        for none. Read where the slot says that there may be one. Does not wait for the device."""

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """Draw one token for each row of logits [R, V], which stay as they are; `mode` serves all of the rows."""

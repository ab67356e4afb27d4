"""Sampling: logits [R, V] and each row's parameters -> one token per row. A row is not a slot: it names its slot.

    rows.py            a slot's parameters as int32 words; the mode that a batch of rows needs
    noise.py           noise keyed by (seed, position, stream, global vocabulary id), from exact integers
    edits.py           logits processors: masks, bias, penalties, in place, before a token is drawn
    keys.py            (value, id) as an integer, for rows that several devices share
    draw.py            three ways to draw: greedy, unfiltered (noise), filtered
    order.py           rows sorted by (value descending, id ascending)
    logprobs.py        log-probabilities of raw logits
    specification.py   all of it for one row in float64, sorted and slow
    inputs.py          hard rows for tests: ties, flat, peaked, masked, tiny vocabularies
    ref.py, triton.py  `SamplerOperations` in PyTorch, and for GPUs

Contract of every implementation: a row's token depends on that row's logits, parameters, history and key alone. Order
of operations, for a row:

    1. edits and penalties      4. top-k, keeps equals of the k-th
    2. temperature              5. top-p, keeps the shortest sorted prefix that reaches p (at least one id)
    3. min-p                    6. argmax of value + Gumbel noise, lowest id among equals
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling.rows import Mode


@dataclass(frozen=True)
class Rows:
    """Slots and parameters of the rows of logits, on the device. Arrays may be longer than R: the rest is padding.

    slots       [R] int64: slot of each row
    positions   [R] int64: position, in its sequence, of the token that is drawn
    table       [S, ROW_WORDS] int32: parameters by slot, see rows.py
    history     [S, L] int32: token ids by position; only those below a row's position are read
    edits       slot -> int32 words of its logits processors (bias, bad words, ...), see rows.py; `table` points to them
    """

    slots: Tensor
    positions: Tensor
    table: Tensor
    history: Tensor
    edits: Mapping[int, Tensor]


class SamplerOperations(Protocol):
    """Operations of a sampler on a device; made by `operations(max_rows, vocab, device)` of an implementation.

    tokens   [>= R] int64: tokens drawn last
    codes    [>= R] uint8: 0: the token is valid; 1: the raw logits have NaN or +inf; 2: no token is left to sample.
             With code 1 or 2 the token is 0 and means nothing
    """

    tokens: Tensor
    codes: Tensor

    def take_masks(self, places: I32, masks: I32) -> None:
        """Set the grammar masks that the next `sample` applies to the logits. Does not wait for the device.

        places   [R] int32: index of the row's mask in `masks`, -1 for none
        masks    [M, ceil(V / 32)] int32, see `Executor.release`

        A mask applies only if the parameters of the row's slot say that it has a grammar.
        """

    def keys(self, logits: Tensor, rows: Rows, mode: Mode, first: int) -> Tensor:
        """Return a key [R] int64 for each row's best id: the id and its processed logit, packed in one integer.

        If devices share a vocabulary, the largest of a row's keys names the token; see keys.py.

        logits   [R, count] of the ids `first` to first + count - 1; `first` is a multiple of 4
        mode     sampling mode that covers the needs of all rows: GREEDY or UNFILTERED
        """

    def settle(self, keys: Tensor) -> None:
        """Set `tokens` and `codes` from `keys` [R] int64, each row's largest packed key (see the method `keys`)."""

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """Draw one token for each row of logits [R, V]. Logits stay as they are; `mode` must cover all rows' needs."""

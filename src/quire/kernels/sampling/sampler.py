"""The sampler: one token per row of logits, by the parameters of the row's slot, and log-probabilities of the tokens.

A batch may mix every kind of request; the token of a row depends on that row alone. The host knows which operations a
batch needs; `kernels/sampling` implements them. Knows slots and rows; knows nothing of plans or the model.
"""

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.sampling.rows import Mode
from quire.kernels.sampling.sampled import Scores, score_samples
from quire.kernels.sampling.table import SamplingTable

CODES: Mapping[int, str] = {1: "nan_logits", 2: "no_token"}  # see `SamplerOperations`


class Sampler:
    """Samples a token for each row of logits, by the sampling parameters of the row's slot in `table`.

    row_slots       [max_rows] int64, static: the slot of each row
    row_positions   [max_rows] int64, static: the position of the token that is drawn
    history         [num_slots, L] int32 token ids of each slot's request by position, on the same device
    """

    def __init__(
        self,
        operations: SamplerOperations,
        table: SamplingTable,
        row_slots: Tensor,
        row_positions: Tensor,
        history: Tensor,
    ) -> None:
        self.table, self.operations = table, operations
        self.rows = Rows(row_slots, row_positions, table.rows, history, table.edits)

    @property
    def tokens(self) -> Tensor:
        """Tokens [>= R] int64 of the rows sampled last; 0 where a row failed."""
        return self.operations.tokens

    @property
    def codes(self) -> Tensor:
        """Error codes [>= R] uint8 of the rows sampled last: 0: no error; others are keys of `CODES`."""
        return self.operations.codes

    def sample(self, logits: Tensor, mode: Mode) -> None:
        """Draw one token for each row of logits [R, V]. The logits are not modified."""
        self.operations.sample(logits, self.rows, mode)

    def take_masks(self, slots: I32, masked: I32, masks: I32) -> None:
        """Set the grammar masks of the next `sample`.

        slots    [r] int32 slots of the sampled rows, in order
        masked   [g] int32 slots whose rows have masks
        masks    [m, ceil(V / 32)] int32, see `Executor.release`
        """
        places, found = np.full(len(slots), -1, np.int32), np.isin(slots, masked)
        places[found] = np.arange(len(masks), dtype=np.int32)
        self.operations.take_masks(places, masks)

    def logprobs(self, logits: Tensor, slots: I32) -> Callable[[], Scores] | None:
        """Launch the log-probabilities of the tokens that `sample` drew, from raw logits [R, V].

        slots   [R] int32 slots of the rows
        Returns a function that gives the results, or None; see `score_samples`.
        """
        return score_samples(logits, slots.tolist(), self.table.scored, self.tokens) if self.table.scored else None

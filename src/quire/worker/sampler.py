"""One token per row of logits, each row by its slot's own parameters; and the log-probabilities of what was drawn.

A batch may mix every kind of request, and a row's outcome depends on nothing but itself. Which operations a batch needs
is known on the host; they are `kernels/sampling`. Knows slots and rows; knows nothing of plans or the model.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.sampling.rows import Mode
from quire.worker.features import Results
from quire.worker.sampling_table import SamplingTable
from quire.worker.scoring import score_samples

CODES: Mapping[int, str] = {1: "nan_logits", 2: "no_token"}  # see `SamplerOperations`


class Sampler:
    """Samples rows by the parameters in a table.

    row_slots, row_positions   [max_rows] int64: static tensors that say whose row it is and where its token will be
    history                    [num_slots, L] int32 on the same device
    """

    def __init__(self, operations: SamplerOperations, table: SamplingTable, row_slots: Tensor, row_positions: Tensor,
                 history: Tensor) -> None:
        self.table, self.operations = table, operations
        self._rows = Rows(row_slots, row_positions, table.rows, history, table.edits)

    @property
    def tokens(self) -> Tensor:
        """[>= R] int64, of the rows that were sampled last; 0 where a row failed."""
        return self.operations.tokens

    @property
    def codes(self) -> Tensor:
        """[>= R] uint8, 0 or a key of `CODES`."""
        return self.operations.codes

    def sample(self, logits: Tensor, mode: Mode) -> None:
        """Draw one token for each row of logits [R, V], which are not modified."""
        self.operations.sample(logits, self._rows, mode)

    def take_masks(self, slots: I32, masked: I32, masks: I32) -> None:
        """What `sample` is to leave of the rows of slots [r]: masks [m, ceil(V / 32)] of those of `masked` [m], in
        their order."""
        places = np.full(len(slots), -1, np.int32)
        places[np.isin(slots, masked)] = np.arange(len(masked), dtype=np.int32)
        self.operations.take_masks(places, masks)

    def logprobs(self, logits: Tensor, slots: I32) -> Results | None:
        """As `score_samples`, of the tokens that `sample` drew for the rows of slots [r] from raw logits."""
        return score_samples(logits, slots.tolist(), self.table.scored, self.tokens) if self.table.scored else None

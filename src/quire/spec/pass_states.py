"""The states of a draft model's recurrent layers in the passes of a drafter, and their copies to checkpoints.

The rows of a first pass are true tokens, those of later passes drafts. A state stays before the last true token, whose
row each later pass computes again, before all drafts so far: these rows are pending, and a later step replays the true
one alone (`quire.kernels.states`).

    first pass    rows  t5 t6 t7          the state stays before t5
    later pass    rows  t7 d8             t5 and t6 are replayed: it stays before t7
    later pass    rows  t7 d8 d9          nothing is replayed
    next step     first pass, rows t8     t7 is replayed, whatever became of d8

A drafter computes the tokens that a step accepts in the next step alone. So the copies that a step asks for are made by
the first pass of the next step, too.
"""

import torch
from torch import Tensor

from quire.kernels.states import StateMeta
from quire.kernels.step.state import zeros

COPIES = 2  # of a sequence in a pass


class PassStates:
    """Metadata of the states of a pass's sequences, with the copies that the pass makes.

    Tables are by slot, [slots, COPIES] int32: lengths after which a copy is made (0: none), and its row of the arena.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        def table() -> tuple[Tensor, Tensor]:
            at, rows = (zeros(num_slots, COPIES, dtype=torch.int32, device=device) for _ in range(2))
            return at, rows

        self._last, self._own = table(), table()
        self._asked = table()  # of the step, as the device has them: then the same tensors in all steps

    def first(self, slots: Tensor, past: Tensor, rows: Tensor) -> None:
        """Choose the copies of a step's first pass: of those that this step asks for, and each slot's last one.

        slots, past, rows   [S] slot of each sequence, its tokens before the pass, and its rows in the pass
        """
        both = zip(self._last, self._asked, strict=True)
        lengths, places = (torch.cat((last[slots], asked[slots]), 1) for last, asked in both)
        again = (lengths[:, COPIES:, None] == lengths[:, None, :COPIES]).any(2)
        due = (lengths > past[:, None]) & (lengths <= (past + rows)[:, None])
        due[:, COPIES:] &= ~again
        found, at = torch.where(due, lengths, 0).topk(COPIES, 1)
        self._own[0][slots], self._own[1][slots] = found, places.gather(1, at)

    def meta(self, starts: Tensor, lengths: Tensor, slots: Tensor, query: int) -> StateMeta:
        """Return the metadata of a pass of at most `query` rows of a sequence.

        Later passes have the copies of `first` again: behind the last true token they make the same, and no other.
        """
        kept_at, kept = self._own
        return StateMeta(starts, lengths, slots, kept_at, kept, max_rows=query, decode_rows=query)

    def follow(self, slots: Tensor, states: StateMeta) -> None:
        """Remember the copies that a step asked for, of its sequences [S]."""
        self._asked = states.kept_at, states.kept
        for last, asked in zip(self._last, self._asked, strict=True):
            last[slots] = asked[slots]

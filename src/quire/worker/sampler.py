"""One token per row of logits, each row by its slot's own parameters; and the log-probabilities of rows.

A batch may mix every kind of request: rows are sorted by what they need, each kind goes through its cheapest path, and
a row's outcome depends on nothing but itself. Knows slots and rows; knows nothing of plans, requests or the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.contracts.step import I32, RowLogprobs
from quire.kernels.sampling.draw import draw_filtered, draw_greedy, draw_plain
from quire.kernels.sampling.edits import edit_row, mask_row, penalize
from quire.worker.sampling_table import Needs, SamplingTable
from quire.worker.scoring import score_samples

Masks = Mapping[int, I32]  # slot -> words, see `Executor.release`
NO_MASKS: Masks = MappingProxyType({})
_BUDGET = 1 << 24  # logits copied at a time: 64 MiB
_REWRITES = Needs.EDITS | Needs.PENALTIES | Needs.GRAMMAR

_SOUND, _NAN, _NONE = 0, 1, 2
CODES = {_NAN: "nan_logits", _NONE: "no_token"}


@dataclass(frozen=True)
class SampleOutput:
    """tokens [R] int64 (0 where the row failed) and codes [R] uint8 (0 = sound), both on the device of the logits."""

    tokens: Tensor
    codes: Tensor

    @property
    def failed(self) -> dict[int, str]:
        """Row -> "nan_logits" (NaN or +inf in the raw logits) or "no_token" (every id masked). Waits for the device."""
        if not self.codes.any():
            return {}
        return {row: CODES[code] for row, code in enumerate(self.codes.tolist()) if code}


class Sampler:
    """Samples rows by the parameters in a `SamplingTable`."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    def sample(
        self, logits: Tensor, row_slots: Tensor, row_positions: Tensor, history: Tensor, masks: Masks = NO_MASKS
    ) -> SampleOutput:
        """Draw one token per row.

        logits [R, V] float32, not modified;  row_slots [R] int64;  row_positions [R] int64, the position of the token
        being sampled (the length of the sequence so far);  history [slots, L] int32, read below that position;
        masks   slot -> the mask of its row, for those slots whose specs say `grammar`
        """
        assert logits.dtype == torch.float32, f"the sampler takes float32 logits, got {logits.dtype}"
        needs = [self.table.needs[slot] for slot in row_slots.tolist()]
        rewritten = [row for row, need in enumerate(needs) if need & _REWRITES]
        if not rewritten:
            return self._settle(logits, needs, row_slots, row_positions)
        tokens = torch.empty_like(row_slots)
        codes = torch.empty_like(row_slots, dtype=torch.uint8)
        for rewrites, rows in ((False, [r for r, need in enumerate(needs) if not need & _REWRITES]), (True, rewritten)):
            for part in _parts(rows, logits):
                copy, slots, positions = logits[part], row_slots[part], row_positions[part]
                broken = _codes(copy.amax(dim=-1)) == _NAN
                if rewrites:
                    self._rewrite(copy, slots, positions, history, masks)
                output = self._settle(copy, [needs[row] for row in part.tolist()], slots, positions)
                tokens[part] = output.tokens.masked_fill_(broken, 0)
                codes[part] = output.codes.masked_fill_(broken, _NAN)
        return SampleOutput(tokens, codes)

    def logprobs(self, logits: Tensor, row_slots: Tensor, tokens: Tensor) -> dict[int, RowLogprobs]:
        """Slot -> the log-probabilities of its sampled rows, in row order, for the slots that asked for any.

        logits [R, V] are the raw ones;  row_slots, tokens [R] int64. Waits for the device.
        """
        found = score_samples(logits, row_slots.tolist(), self.table.specs, tokens)
        return found() if found else {}

    def _rewrite(self, logits: Tensor, slots: Tensor, positions: Tensor, history: Tensor, masks: Masks) -> None:
        """Apply the rows' masks and edits, then their penalties, in place."""
        penalized = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if slot in masks:
                mask_row(logits[row], masks[slot])
            if self.table.needs[slot] & Needs.EDITS:
                edit_row(logits[row], self.table.edits[slot], history[slot], position)
            if self.table.needs[slot] & Needs.PENALTIES:
                penalized.append(row)
        if penalized:
            part = torch.tensor(penalized, device=logits.device)
            rows, known = logits[part], positions[part]
            penalties, num_prompt = self.table.penalties(slots[part])
            penalize(rows, penalties, history[slots[part], : int(known.max())], known, num_prompt)
            logits[part] = rows

    def _settle(self, logits: Tensor, needs: list[Needs], slots: Tensor, positions: Tensor) -> SampleOutput:
        """Greedy or drawn tokens of logits that need no more rewriting."""
        tokens, peak = draw_greedy(logits)
        codes = _codes(peak)
        sound = (codes == _SOUND).tolist()
        for narrow, draw in ((False, self._plain), (True, self._filtered)):
            rows = [
                row
                for row, need in enumerate(needs)
                if sound[row] and need & Needs.NOISE and bool(need & Needs.FILTERS) is narrow
            ]
            for part in _parts(rows, logits):
                whole = len(part) == len(needs)
                tokens[part] = draw(logits if whole else logits[part], slots[part], positions[part])
        return SampleOutput(tokens.masked_fill_(codes != _SOUND, 0), codes)

    def _plain(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return draw_plain(logits, self.table.filters(slots).temperature, self.table.key(slots, positions))[0]

    def _filtered(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return draw_filtered(logits, self.table.filters(slots), self.table.key(slots, positions))


def _parts(rows: list[int], logits: Tensor) -> list[Tensor]:
    """`rows` as index tensors, each short enough that a copy of those rows stays within the budget."""
    step = max(1, _BUDGET // logits.shape[1])
    return [torch.tensor(rows[i : i + step], device=logits.device) for i in range(0, len(rows), step)]


def _codes(peak: Tensor) -> Tensor:
    """[R] largest logits -> [R] uint8: NaN and +inf are broken rows, -inf leaves nothing to sample."""
    codes = torch.zeros_like(peak, dtype=torch.uint8)
    codes.masked_fill_(peak.isnan() | (peak == torch.inf), _NAN)
    return codes.masked_fill_(peak == -torch.inf, _NONE)

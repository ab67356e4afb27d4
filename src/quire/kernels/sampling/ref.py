"""The operations of a sampler in PyTorch, on any device; contract: see `SamplerOperations`.

Rows are grouped by their needs, and each group takes its cheapest path. Waits for the device.
"""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling import Rows
from quire.kernels.sampling.draw import Filters, draw_filtered, draw_greedy, draw_unfiltered
from quire.kernels.sampling.edits import Penalties, RowEdits, edit_row, mask_row, penalize
from quire.kernels.sampling.keys import pack_keys, unpack_keys
from quire.kernels.sampling.noise import NoiseKey
from quire.kernels.sampling.rows import Mode, Needs

_BUDGET = 1 << 24  # logits copied at a time: 64 MiB
_REWRITES = Needs.EDITS | Needs.PENALTIES | Needs.GRAMMAR
_SOUND, _NAN, _NONE = 0, 1, 2


def operations(max_rows: int, vocab: int, device: torch.device) -> "TorchSampling":
    """Return the `SamplerOperations` in PyTorch; `max_rows` and `vocab` are not used."""
    return TorchSampling(device)


class TorchSampling:
    """The `SamplerOperations` in PyTorch. `tokens` and `codes` have exactly the rows of the last batch."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.codes = torch.empty(0, dtype=torch.uint8, device=device)
        self._masks: dict[int, I32] = {}  # by row
        self._decoded: dict[int, tuple[Tensor, RowEdits]] = {}  # by slot: the words, and the decoded edits

    def take_masks(self, places: I32, masks: I32) -> None:
        """Set the grammar masks of the next `sample`. See `SamplerOperations`."""
        self._masks = {row: masks[place] for row, place in enumerate(places.tolist()) if place >= 0}

    def keys(self, logits: Tensor, rows: Rows, mode: Mode, first: int) -> Tensor:
        """Return the packed keys of the best ids of each row. See `SamplerOperations`."""
        tokens, peaks = draw_greedy(logits)
        ids, best = tokens + first, peaks
        if mode == Mode.UNFILTERED:
            batch = _Batch(logits, rows)
            key = batch.key(batch.params, batch.positions)
            drawn, scores = draw_unfiltered(logits, batch.params.view(torch.float32)[:, 1], key, first)
            noisy = (batch.params[:, 0] & int(Needs.NOISE)) != 0
            ids, best = torch.where(noisy, drawn, ids), torch.where(noisy, scores, best)
        return pack_keys(best, ids, peaks)

    def settle(self, keys: Tensor) -> None:
        """Set `tokens` and `codes` from the largest key of each row."""
        self.tokens, self.codes = unpack_keys(keys)

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """Draw one token for each row of logits [R, V] float32, into `tokens` and `codes`. See `SamplerOperations`."""
        assert logits.dtype == torch.float32, f"the sampler takes float32 logits, got {logits.dtype}"
        if mode == Mode.GREEDY:
            tokens, peak = draw_greedy(logits)
            self.codes = _codes(peak)
            self.tokens = tokens.masked_fill_(self.codes != _SOUND, 0)
            return
        batch = _Batch(logits, rows)
        self.tokens, self.codes = batch.settle(logits) if mode < Mode.FULL else self._full(batch, rows)
        self._masks = {}

    def _full(self, batch: "_Batch", rows: Rows) -> tuple[Tensor, Tensor]:
        """Draw tokens as `_Batch.settle` does; rows with masks, edits or penalties are copied and rewritten first."""
        tokens = torch.empty_like(batch.slots)
        codes = torch.empty_like(batch.slots, dtype=torch.uint8)
        rewritten = [bool(need & _REWRITES) for need in batch.needs]
        for rewrites in (False, True):
            for numbers in _parts([row for row, one in enumerate(rewritten) if one is rewrites], batch.logits):
                some, part = batch.part(numbers)
                broken = _codes(some.logits.amax(dim=-1)) == _NAN
                if rewrites:
                    self._rewrite(some, rows, numbers)
                found, found_codes = some.settle(some.logits)
                tokens[part] = found.masked_fill_(broken, 0)
                codes[part] = found_codes.masked_fill_(broken, _NAN)
        return tokens, codes

    def _rewrite(self, batch: "_Batch", rows: Rows, numbers: list[int]) -> None:
        """Apply the rows' masks and edits, then their penalties, in place. numbers: index of each row in the step."""
        penalized = []
        slots, positions, least = batch.slots.tolist(), batch.positions.tolist(), batch.params[:, 13].tolist()
        for row, (need, number) in enumerate(zip(batch.needs, numbers, strict=True)):
            slot = slots[row]
            if need & Needs.GRAMMAR and number in self._masks:
                mask_row(batch.logits[row], self._masks[number])
            if need & Needs.EDITS:
                edits = self._edits(slot, rows.edits[slot])
                edit_row(batch.logits[row], edits, rows.history[slot], positions[row], least[row])
            if need & Needs.PENALTIES:
                penalized.append(row)
        if penalized:
            some, part = (batch, None) if len(penalized) == len(batch.needs) else batch.part(penalized)
            known = int(some.positions.max())
            penalize(some.logits, some.penalties, rows.history[some.slots, :known], some.positions, some.num_prompt)
            if part is not None:
                batch.logits[part] = some.logits

    def _edits(self, slot: int, words: Tensor) -> RowEdits:
        """Return the decoded edits of a slot; kept until the slot gets other words."""
        known = self._decoded.get(slot)
        if known is None or known[0] is not words:
            known = self._decoded[slot] = words, RowEdits.decode(words)
        return known[1]


class _Batch:
    """Rows of logits with their slots, positions and parameters [R, ROW_WORDS]."""

    def __init__(self, logits: Tensor, rows: Rows) -> None:
        self.logits = logits
        self.slots, self.positions = rows.slots[: len(logits)], rows.positions[: len(logits)]
        self.params = rows.table.index_select(0, self.slots)
        self.needs: list[int] = self.params[:, 0].tolist()

    def part(self, rows: list[int]) -> tuple["_Batch", Tensor | slice]:
        """Return a batch of these rows with a copy of their logits, and an index that selects the rows."""
        part = copy(self)
        if len(rows) == len(self.needs):
            part.logits = self.logits.clone()
            return part, slice(None)
        index = torch.tensor(rows, device=self.logits.device)
        part.logits, part.slots, part.positions = self.logits[index], self.slots[index], self.positions[index]
        part.params, part.needs = self.params[index], [self.needs[row] for row in rows]
        return part, index

    @property
    def penalties(self) -> Penalties:
        """Penalties of the rows, [R] each."""
        return Penalties(*self.params.view(torch.float32)[:, 10:13].unbind(1))

    @property
    def num_prompt(self) -> Tensor:
        """Prompt lengths of the rows, [R] int64."""
        return self.params[:, 3].long()

    def settle(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (greedy or drawn) and the codes of the rows.

        logits   of the rows, after masks, bias and penalties
        """
        tokens, peak = draw_greedy(logits)
        codes = _codes(peak)
        sound = (codes == _SOUND).tolist()
        draws: tuple[tuple[bool, Callable[[Tensor, Tensor, NoiseKey], Tensor]], ...] = (
            (False, _unfiltered),
            (True, _filtered),
        )
        for narrow, draw in draws:
            rows = [
                row
                for row, need in enumerate(self.needs)
                if sound[row] and need & Needs.NOISE and bool(need & Needs.FILTERS) is narrow
            ]
            for numbers in _parts(rows, logits):
                if len(numbers) == len(self.needs):
                    tokens.copy_(draw(logits, self.params, self.key(self.params, self.positions)))
                    continue
                part = torch.tensor(numbers, device=logits.device)
                params = self.params[part]
                tokens[part] = draw(logits[part], params, self.key(params, self.positions[part]))
        return tokens.masked_fill_(codes != _SOUND, 0), codes

    @staticmethod
    def key(params: Tensor, positions: Tensor) -> NoiseKey:
        return NoiseKey(params.view(torch.int64)[:, 2], positions)


def _unfiltered(logits: Tensor, params: Tensor, key: NoiseKey) -> Tensor:
    return draw_unfiltered(logits, params.view(torch.float32)[:, 1], key)[0]


def _filtered(logits: Tensor, params: Tensor, key: NoiseKey) -> Tensor:
    top_p, min_p = params.view(torch.float64)[:, 3:5].unbind(1)
    return draw_filtered(logits, Filters(params.view(torch.float32)[:, 1], params[:, 2].long(), top_p, min_p), key)


def _parts(rows: list[int], logits: Tensor) -> list[list[int]]:
    """Split `rows` into parts, so that a copy of the logits of a part stays within the budget."""
    step = max(1, _BUDGET // logits.shape[1])
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def _codes(peak: Tensor) -> Tensor:
    """Return codes [R] uint8 from the largest logits [R]: NaN and +inf mark a broken row, -inf an empty one."""
    codes = torch.zeros_like(peak, dtype=torch.uint8)
    codes.masked_fill_(peak.isnan() | (peak == torch.inf), _NAN)
    return codes.masked_fill_(peak == -torch.inf, _NONE)

"""Sampling where each rank holds the logits of a slice of the vocabulary. Every rank gets the tokens that one device
would draw, because noise is keyed by the id and the winner is the largest value over all ranks.

Greedy rows and draws without filters: each rank takes its own best id, and the ranks exchange (id, value) pairs, 24
bytes a row. Filters, penalties, bias and masks: every rank gathers the logits and samples the whole rows.
"""

import torch
from torch import Tensor

from quire.contracts.step import I32
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.sampling.draw import draw_greedy, draw_unfiltered
from quire.kernels.sampling.noise import NoiseKey
from quire.kernels.sampling.rows import Mode, Needs


class SlicedSampling:
    """The sampler of a rank; see `SamplerOperations`. tokens and codes have constant addresses.

    whole    operations for rows of the whole vocabulary
    pairs    the most expensive mode in which ranks exchange pairs instead of logits
    """

    def __init__(self, whole: SamplerOperations, vocabulary: VocabularySlice, max_rows: int, device: torch.device,
                 pairs: Mode = Mode.UNFILTERED) -> None:
        self._whole, self._vocabulary, self._pairs = whole, vocabulary, pairs
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.codes = torch.zeros(max_rows, dtype=torch.uint8, device=device)

    def take_masks(self, places: I32, masks: I32) -> None:
        """Set the grammar masks of the next `sample`. See `SamplerOperations`."""
        self._whole.take_masks(places, masks)

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """Draw one token for each row of this rank's logits [R, count]. See `SamplerOperations`."""
        count = len(logits)
        if mode > self._pairs:
            self._whole.sample(self._vocabulary.whole(logits), rows, mode)
            self.tokens[:count].copy_(self._whole.tokens[:count])
            self.codes[:count].copy_(self._whole.codes[:count])
            return
        tokens, peak = draw_greedy(logits)
        tokens, best = tokens + self._vocabulary.first, peak
        if mode == Mode.UNFILTERED:
            params = rows.table.index_select(0, rows.slots[:count])
            key = NoiseKey(params.view(torch.int64)[:, 2], rows.positions[:count])
            drawn, scores = draw_unfiltered(logits, params.view(torch.float32)[:, 1], key, self._vocabulary.first)
            noisy = (params[:, 0] & int(Needs.NOISE)) != 0
            tokens, best = torch.where(noisy, drawn, tokens), torch.where(noisy, scores, best)
        found = self._vocabulary.winner(tokens, best, peak)
        codes = self.codes[:count].zero_()
        codes.masked_fill_(found.peak.isnan() | (found.peak == torch.inf), 1)
        codes.masked_fill_(found.peak == -torch.inf, 2)
        self.tokens[:count].copy_(found.tokens.masked_fill(codes != 0, 0))

"""Draws of tokens from logits: three paths with the same meaning. A cheaper path leaves out what a row does not need.

    greedy       the largest logit, the lowest id among equals
    unfiltered   argmax(logits / temperature + Gumbel noise)
    filtered     the same over the ids that min-p, top-k and top-p leave

A row's token depends on that row alone: no reduction changes its order with the number of rows, and noise is keyed by
the row. Edits and penalties are already applied. A row whose largest logit is NaN or infinite gives a meaningless
token: callers check `best` (greedy, unfiltered), or remove such rows before (filtered).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.sampling.noise import NoiseKey, gumbel, gumbel_at
from quire.kernels.sampling.order import largest

_WIDTH = 256  # candidates looked at before the whole row is sorted
_CHUNK = 1 << 18  # logits per pass of the unfiltered path: 1 MiB of float32


@dataclass(frozen=True)
class Filters:
    """Temperature, top-k, top-p and min-p of R rows of logits, a tensor [R] each.

    temperature    float32, > 0
    top_k          int64; 0: off
    top_p, min_p   float64; off at 1 and at 0
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor | slice) -> "Filters":
        """Return the filters of the rows `index`."""
        return Filters(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def draw_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greedy token [R] int64 of each row of logits [R, V], and its logit [R] (NaN for a row with NaN)."""
    if logits.device.type == "cpu":  # NumPy uses no threads, which would spin on beside the next step
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best, tokens = logits.max(dim=-1)
    return tokens, best


def draw_unfiltered(logits: Tensor, temperature: Tensor, key: NoiseKey, first_id: int = 0) -> tuple[Tensor, Tensor]:
    """Draw a token per row, without filters. Return tokens [R] (global vocabulary ids) and their scores [R].

    logits     [R, V] float32 of the vocabulary ids first_id .. first_id + V - 1
    first_id   first id of this rank's shard of the vocabulary; 0 for a whole vocabulary

    A score is logit / temperature + noise. If ranks share the vocabulary, the token with the largest score wins.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    step = max(1, _CHUNK // vocab)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        score = logits[part] / temperature[part].unsqueeze(1)
        best[part], tokens[part] = score.add_(gumbel(key.rows(part), first_id, vocab)).max(dim=-1)
    return tokens + first_id, best


def draw_filtered(logits: Tensor, filters: Filters, key: NoiseKey) -> Tensor:
    """Draw a token per row with min-p, top-k and top-p. Return tokens [R] int64.

    logits   [R, V] float32; each row has a finite maximum

    Only the largest few logits of a row are sorted. If the filters keep more ids than these, the whole row is sorted.
    Both ways keep the same ids, with the same arithmetic.
    """
    vocab = logits.shape[1]
    scaled = logits / filters.temperature.unsqueeze(1)
    mass = torch.softmax(scaled, dim=-1).amax(dim=-1).to(torch.float64).reciprocal_()
    tokens, complete = _draw_from_largest(scaled, filters, mass, key, _WIDTH)
    rest = (~complete).nonzero().squeeze(1)
    step = max(1, _CHUNK // vocab)
    for start in range(0, len(rest), step):
        part = rest[start : start + step]
        tokens[part], _ = _draw_from_largest(scaled[part], filters.rows(part), mass[part], key.rows(part), vocab)
    return tokens


def _draw_from_largest(
    scaled: Tensor, filters: Filters, mass: Tensor, key: NoiseKey, width: int
) -> tuple[Tensor, Tensor]:
    """Draw tokens [R] from the `width` largest logits of each row. Return them, and [R] bool: these were enough."""
    vocab = scaled.shape[1]
    values, ids = largest(scaled, width)
    keep, complete = _kept(values, filters, mass)
    return _pick(values, ids, keep, key, vocab), complete | (width >= vocab)


def _kept(values: Tensor, filters: Filters, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the filters to sorted candidates [R, W]. Return [R, W] bool: kept, and [R] bool: W was enough to tell.

    min-p and top-k are thresholds on the value, so equals stay or go together. top-p keeps the shortest prefix whose
    probability, renormalized over the ids that min-p and top-k keep, reaches p. Sums along the sorted prefix run in
    order, so that they do not depend on W.

    mass   [R] float64: sum of exp(value - largest) over the whole row; used for rows without min-p and top-k
    """
    width = values.shape[1]
    weight = _exp_in_place((values - values[:, :1]).to(torch.float64))
    rank = torch.where(filters.top_k > 0, filters.top_k, width).clamp(max=width) - 1
    left = (values > -torch.inf) & (values >= values.gather(1, rank.unsqueeze(1)))
    left &= weight >= filters.min_p.unsqueeze(1)
    weight.mul_(left)
    reached = weight.cumsum(dim=-1)
    thresholds = (filters.top_k > 0) | (filters.min_p > 0)
    total = torch.where(thresholds, reached[:, -1], mass)
    before = reached - weight
    keep = left & ((before < (filters.top_p * total).unsqueeze(1)) | (filters.top_p >= 1.0).unsqueeze(1))
    last = values[:, -1]
    complete = _lowest(values, keep) > last
    complete &= ~thresholds | (_lowest(values, left) > last)
    return keep, complete | (last == -torch.inf)


def _exp_in_place(values: Tensor) -> Tensor:
    """Replace a float64 tensor by its exp; return it. On a CPU NumPy does it, without threads: see `log_in_place`."""
    if values.device.type == "cpu":
        array = values.numpy()
        np.exp(array, out=array)
        return values
    return values.exp_()


def _lowest(values: Tensor, prefix: Tensor) -> Tensor:
    """Return the last value of each row's non-empty prefix."""
    return values.gather(1, prefix.sum(dim=-1, keepdim=True) - 1).squeeze(1)


def _pick(values: Tensor, ids: Tensor, keep: Tensor, key: NoiseKey, vocab: int) -> Tensor:
    """Return the kept id with the largest value + noise, the lowest id among equals. Only candidates get noise."""
    width = int(keep.sum(dim=-1).max())
    values, ids, keep = values[:, :width], ids[:, :width], keep[:, :width]
    noise = gumbel_at(key, ids) if width * 4 < vocab else gumbel(key, 0, vocab).gather(1, ids)
    score = (values + noise).masked_fill_(~keep, -torch.inf)
    best = score.amax(dim=-1, keepdim=True)
    return ids.masked_fill(score != best, vocab).amin(dim=-1)

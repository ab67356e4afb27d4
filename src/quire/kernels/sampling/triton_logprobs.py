"""Log-probabilities of rows that stay on the device: what logprobs.py says, without waiting for anything.

Needs no kernel of its own: it runs only where a request asks, and PyTorch's operations take no size from the device.
"""

import torch
from torch import Tensor

_BUDGET = 1 << 24  # logits per pass: 64 MiB of scores, and three times that while their order is looked for


def row_logprobs(
    logits: Tensor, index: Tensor, chosen: Tensor, k: int, extra: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Score `chosen` [R] int64 under the rows `index` [R] of raw logits [., V] -> ids [R, 1 + K] int32,
    log-probabilities float32, ranks [R].

    The first column is the chosen token; then come the k <= V most likely (equals by ascending id), or, when `extra`
    [K] int64 is given, those ids (-inf where outside the vocabulary). A rank is 1 + the number of larger ones, int32.
    """
    rows, step = len(index), max(1, _BUDGET // logits.shape[1])
    parts = [_scored(logits[index[at : at + step]], chosen[at : at + step], k, extra) for at in range(0, rows, step)]
    ids, values, ranks = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(values), torch.cat(ranks)


def _scored(logits: Tensor, chosen: Tensor, k: int, extra: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    scores = torch.log_softmax(logits.to(torch.float32), dim=-1)
    own = chosen.unsqueeze(1)
    own_score = scores.gather(1, own)
    if extra is None:
        others = _top_ids(scores, k)
        values = scores.gather(1, others)
    else:
        others = extra.expand(rows, -1)
        outside = (others < 0) | (others >= vocab)
        values = scores.gather(1, others.clamp(0, vocab - 1)).masked_fill(outside, -torch.inf)
    ids = torch.cat((own, others), dim=1).to(torch.int32)
    ranks = (scores > own_score).sum(dim=-1, dtype=torch.int32) + 1
    return ids, torch.cat((own_score, values), dim=1), ranks


def _top_ids(scores: Tensor, k: int) -> Tensor:
    """Ids [R, k] of the largest, equals by ascending id: value and id in one int64, of which no two are equal."""
    if k == 0:
        return torch.empty((scores.shape[0], 0), dtype=torch.int64, device=scores.device)
    bits = scores.neg().add_(0.0).view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    ids = torch.arange(scores.shape[1], device=scores.device)
    keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)
    return torch.topk(keys, k, dim=-1, largest=False, sorted=True).values & 0xFFFFFFFF

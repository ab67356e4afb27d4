"""Log-probabilities of rows, from raw logits: before any edit, penalty or temperature.

Knows nothing of slots; a long prompt is scored in chunks of rows, so memory is bounded whatever the caller brings.
"""

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import RowLogprobs
from quire.kernels.sampling.order import top_by_id

WHOLE_VOCABULARY = -1
_BUDGET = 1 << 24  # float32 values per chunk: 64 MiB


def row_logprobs(logits: Tensor, chosen: Tensor, k: int, extra_ids: tuple[int, ...] = ()) -> RowLogprobs:
    """Score `chosen` [R] int64 under logits [R, V] float32, with alternatives.

    Columns after the first are the `k` most likely tokens (equals by ascending id; -1 = the whole vocabulary), or, when
    `extra_ids` is not empty, exactly those ids whatever `k` says. A rank is 1 + the number of tokens with a strictly
    larger log-probability. An id outside the vocabulary scores -inf.
    """
    rows, vocab = logits.shape
    k = vocab if k == WHOLE_VOCABULARY else min(k, vocab)
    columns = 1 + (len(extra_ids) or k)
    ids = np.empty((rows, columns), np.int32)
    values = np.empty((rows, columns), np.float32)
    ranks = np.empty(rows, np.int32)
    step = max(1, _BUDGET // vocab)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        scores = torch.log_softmax(logits[part].to(torch.float32), dim=-1)
        own = chosen[part].unsqueeze(1)
        own_score = _at(scores, own)
        other_ids, others = _alternatives(scores, k, extra_ids)
        ids[part] = torch.cat((own, other_ids), dim=1).cpu().numpy()
        values[part] = torch.cat((own_score, others), dim=1).cpu().numpy()
        ranks[part] = ((scores > own_score).sum(dim=-1) + 1).cpu().numpy()
    return RowLogprobs(ids, values, ranks)


def _at(scores: Tensor, ids: Tensor) -> Tensor:
    """Scores [R, V] at ids [R, K]; -inf for ids outside the vocabulary."""
    vocab = scores.shape[1]
    outside = (ids < 0) | (ids >= vocab)
    return scores.gather(1, ids.clamp(0, vocab - 1)).masked_fill_(outside, -torch.inf)


def _alternatives(scores: Tensor, k: int, extra_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if extra_ids:
        ids = torch.tensor(extra_ids, dtype=torch.int64, device=scores.device).expand(scores.shape[0], -1)
        return ids, _at(scores, ids)
    others, ids = top_by_id(scores, k)
    return ids, others

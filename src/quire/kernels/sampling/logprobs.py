"""Log-probabilities of rows, from raw logits: before any edit, penalty or temperature.

Knows nothing of slots; many rows are scored in chunks, so memory is bounded whatever the caller brings. On a GPU
nothing waits: no size here comes from the device.
"""

import torch
from torch import Tensor

from quire.contracts.step import RowLogprobs
from quire.kernels.sampling.order import top_by_id, top_packed

WHOLE_VOCABULARY = -1
_BUDGET = 1 << 24  # logits per pass: 64 MiB of scores, and three times that while their order is looked for on a GPU


def row_logprobs(logits: Tensor, chosen: Tensor, k: int, extra: Tensor | None = None) -> RowLogprobs:
    """`score_rows` of all rows of logits [R, V], on the host; waits for the device."""
    return RowLogprobs(*(part.cpu().numpy() for part in score_rows(logits, chosen, k, extra)))


def score_rows(logits: Tensor, chosen: Tensor, k: int, extra: Tensor | None = None,
               index: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Score `chosen` [R] int64 under the rows `index` [R] (None: all) of raw logits [., V] -> ids [R, 1 + K] int32,
    log-probabilities float32, ranks [R] int32.

    The first column is the chosen token; then come the `k` most likely (equals by ascending id; -1 = the whole
    vocabulary), or, when `extra` [K] int64 is given, exactly those ids whatever `k` says. A rank is 1 + the number of
    tokens with a strictly larger log-probability. An id outside the vocabulary scores -inf.
    """
    rows, vocab = len(chosen), logits.shape[1]
    extra = chosen[:0] if k == 0 and extra is None else extra
    k, step = vocab if k == WHOLE_VOCABULARY else min(k, vocab), max(1, _BUDGET // vocab)
    parts = []
    for part in (slice(at, at + step) for at in range(0, max(rows, 1), step)):
        scores = torch.log_softmax((logits[part] if index is None else logits[index[part]]).to(torch.float32), dim=-1)
        top = top_by_id if scores.device.type == "cpu" else top_packed
        others = top(scores, k)[1] if extra is None else extra.expand(len(scores), -1)
        ids = torch.cat((chosen[part].unsqueeze(1), others), dim=1)
        values = scores.gather(1, ids.clamp(0, vocab - 1)).masked_fill_((ids < 0) | (ids >= vocab), -torch.inf)
        ranks = (scores > values[:, :1]).sum(dim=-1, dtype=torch.int32) + 1
        parts.append((ids.to(torch.int32), values, ranks))
    ids, values, ranks = map(torch.cat, zip(*parts, strict=True))
    return ids, values, ranks

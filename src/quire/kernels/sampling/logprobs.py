"""Log-probabilities of rows from raw logits, before any edit, penalty or temperature.

Rows are scored in chunks, so memory is bounded for any number of rows. On a GPU the host does not wait: no size depends
on the device's values. Knows nothing of slots.
"""

import torch
from torch import Tensor

from quire.kernels.sampling.order import top_by_id, top_packed

WHOLE_VOCABULARY = -1
_BUDGET = 1 << 24  # logits per pass: 64 MiB of scores, and three times that while a GPU sorts them


def score_rows(
    logits: Tensor, chosen: Tensor, k: int, extra: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities: ids [R, 1 + K] int32, their log-probabilities [R, 1 + K] float32, and ranks [R] int32.

    logits   [., V] raw logits
    index    [R] int64: the rows of `logits` to use; None: all
    chosen   [R] int64: the token of each row. It is the first column, and `ranks` are those of these tokens
    k        the other columns are the k most likely ids (equals by ascending id); -1: the whole vocabulary
    extra    [K] int64: the other columns are exactly these ids, for any `k`; None: by `k`

    A rank is 1 + the number of tokens with a strictly larger log-probability. An id outside the vocabulary gets -inf.
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

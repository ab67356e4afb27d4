"""Log-probabilities of rows on the host, for tests."""

from torch import Tensor

from quire.contracts.step import RowLogprobs
from quire.kernels.sampling.logprobs import score_rows


def row_logprobs(logits: Tensor, chosen: Tensor, k: int, extra: Tensor | None = None) -> RowLogprobs:
    """Return on the host what `score_rows` returns for all rows of logits [R, V]. Waits for the device."""
    return RowLogprobs(*(part.cpu().numpy() for part in score_rows(logits, chosen, k, extra)))

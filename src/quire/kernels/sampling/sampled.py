"""Log-probabilities of sampled tokens, for the slots that ask for them."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import RowLogprobs
from quire.kernels.host_copies import back, sent
from quire.kernels.sampling.logprobs import WHOLE_VOCABULARY, score_rows

Scores = dict[str, dict[int, RowLogprobs]]  # field of `StepResult` -> slot -> its rows


def score_samples(
    logits: Tensor, slots: list[int], specs: Mapping[int, SamplerSpec], tokens: Tensor
) -> Callable[[], Scores] | None:
    """Launch log-probabilities of sampled tokens, for the slots whose `specs` ask for them, and the copies to the host.

    Returns a function that gives slot -> its `RowLogprobs`, in order; None if no slot asks.

    logits   [>= R, V] raw logits; the first R rows are those of `slots`
    specs    slot -> its request's parameters
    tokens   [>= R] int64 sampled tokens

    All rows that ask for the k most likely tokens are scored together, with the largest k. Each row keeps its own first
    1 + k columns.
    """
    vocab, device = logits.shape[1], logits.device
    groups: dict[tuple[int, ...] | int, dict[int, tuple[int, int]]] = {}  # kind -> row -> slot, columns
    for row, slot in enumerate(slots if specs else ()):
        spec = specs.get(slot)
        if spec is None or (spec.num_logprobs is None and not spec.logprob_ids):
            continue
        asked = spec.num_logprobs or 0
        width = len(spec.logprob_ids) or (vocab if asked == WHOLE_VOCABULARY else min(asked, vocab))
        groups.setdefault(spec.logprob_ids or min(asked, 0), {})[row] = slot, 1 + width
    parts: list[tuple[Iterable[tuple[int, int]], list[Tensor]]] = []
    for kind, owners in groups.items():
        index, k = sent(list(owners), device), max(columns for _, columns in owners.values()) - 1
        extra = sent(kind, device) if isinstance(kind, tuple) else None
        parts.append((owners.values(), [back(part) for part in score_rows(logits, tokens[index], k, extra, index)]))
    return (lambda: {"logprobs": _collected(parts)}) if parts else None


def _collected(parts: list[tuple[Iterable[tuple[int, int]], list[Tensor]]]) -> dict[int, RowLogprobs]:
    found: dict[int, list[RowLogprobs]] = {}
    for owners, scored in parts:
        ids, values, ranks = (part.numpy() for part in scored)
        for row, (slot, columns) in enumerate(owners):
            one = slice(row, row + 1)
            found.setdefault(slot, []).append(RowLogprobs(ids[one, :columns], values[one, :columns], ranks[one]))
    return {slot: joined(rows) for slot, rows in found.items()}


def joined(parts: list[RowLogprobs]) -> RowLogprobs:
    """Concatenate log-probabilities of rows: the rows of all parts, in order."""
    return RowLogprobs(*map(np.concatenate, zip(*((p.ids, p.logprobs, p.ranks) for p in parts), strict=True)))

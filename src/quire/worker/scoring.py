"""Log-probabilities of prompt tokens, from the hidden states of a step that computed them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import RowLogprobs
from quire.kernels.sampling.logprobs import row_logprobs

SCORE_ROWS = 64  # prompt rows whose logits exist at once: 64 x 152k x 4 bytes = 39 MB


@dataclass(frozen=True)
class Scored:
    """Rows `first` .. `first + count` of the step's hidden states are `slot`'s tokens from `position` on."""

    slot: int
    first: int
    count: int
    position: int
    spec: SamplerSpec


def score_prompts(
    scored: Iterable[Scored], hidden: Tensor, logits_of: Callable[[Tensor], Tensor], history: Tensor
) -> dict[int, RowLogprobs]:
    """Slot -> its rows: each scores the token after it; a prompt's last row has none. Waits for the device.

    hidden [T, hidden];  logits_of  [R, hidden] -> [R, V] float32;  history [slots, L] int32 token ids by position
    """
    found = {}
    for one in scored:
        assert one.spec.num_prompt_logprobs is not None
        rows = min(one.count, one.spec.num_prompt - 1 - one.position)
        targets = history[one.slot, one.position + 1 : one.position + 1 + rows].long()
        parts = []
        for at in range(0, rows, SCORE_ROWS):
            stop = min(at + SCORE_ROWS, rows)
            logits = logits_of(hidden[one.first + at : one.first + stop])
            parts.append(row_logprobs(logits, targets[at:stop], one.spec.num_prompt_logprobs))
        if parts:
            found[one.slot] = joined(parts)
    return found


def unscorable(scored: dict[int, RowLogprobs]) -> dict[int, str]:
    """Slots whose prompt rows have NaN log-probabilities."""
    return {slot: "nan_logits" for slot, rows in scored.items() if np.isnan(rows.logprobs[:, 0]).any()}


def joined(parts: list[RowLogprobs]) -> RowLogprobs:
    """The rows of all parts, in order."""
    return RowLogprobs(*map(np.concatenate, zip(*((p.ids, p.logprobs, p.ranks) for p in parts), strict=True)))

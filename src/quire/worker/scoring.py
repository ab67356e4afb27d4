"""Log-probabilities of a step's tokens: of prompts, from the hidden states that it computed, and of what it sampled."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import RowLogprobs
from quire.kernels.sampling.logprobs import WHOLE_VOCABULARY, row_logprobs, score_rows

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


def score_samples(logits: Tensor, slots: list[int], specs: Mapping[int, SamplerSpec],
                  tokens: Tensor) -> Callable[[], dict[int, RowLogprobs]] | None:
    """Log-probabilities of sampled tokens [R], slot -> its rows in order, for the slots whose `specs` ask for any.

    The first rows of the raw logits [., V] are those of `slots`. Launches the work and the copies; what is returned may
    be called once the device has come past them. None: nobody asked. Rows that ask for a number of alternatives are
    scored together, so their widths differ only in what is cut off.
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
    return (lambda: _collected(parts)) if parts else None


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers on the device as int64, without waiting for it."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def back(values: Tensor) -> Tensor:
    """Values as they will be on the host once the device has come past this."""
    out = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return out.copy_(values, non_blocking=True)


def _collected(parts: list[tuple[Iterable[tuple[int, int]], list[Tensor]]]) -> dict[int, RowLogprobs]:
    found: dict[int, list[RowLogprobs]] = {}
    for owners, scored in parts:
        ids, values, ranks = (part.numpy() for part in scored)
        for row, (slot, columns) in enumerate(owners):
            one = slice(row, row + 1)
            found.setdefault(slot, []).append(RowLogprobs(ids[one, :columns], values[one, :columns], ranks[one]))
    return {slot: joined(rows) for slot, rows in found.items()}


def joined(parts: list[RowLogprobs]) -> RowLogprobs:
    """The rows of all parts, in order."""
    return RowLogprobs(*map(np.concatenate, zip(*((p.ids, p.logprobs, p.ranks) for p in parts), strict=True)))

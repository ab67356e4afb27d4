"""Log-probabilities of prompt tokens (from the hidden states of a step) and of sampled tokens (from its logits)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import PROMPT_LOGPROBS, RowLogprobs, StepPlan
from quire.kernels.sampling.logprobs import WHOLE_VOCABULARY, score_rows
from quire.worker.features import Found, Results, StepFeature

SCORE_ROWS = 64  # prompt rows whose logits exist at once: 64 x 152k x 4 bytes = 39 MB
PINNED = 1 << 20  # values of a copy to pinned memory, at most: pinned memory stays allocated. Larger copies wait


@dataclass
class _Scored:
    """The prompt of a slot whose rows are scored; `computed`: its tokens computed so far."""

    spec: SamplerSpec
    computed: int


class PromptScorer(StepFeature):
    """Computes log-probabilities of prompt tokens.

    The hidden state of a token scores the next token of the prompt. That of the prompt's last token scores nothing.

    logits_of  hidden states [R, hidden] before the final norm -> logits [R, V] float32
    history    [slots, L] int32 token ids by position
    """

    def __init__(self, logits_of: Callable[[Tensor], Tensor], history: Tensor) -> None:
        self._logits_of, self._history = logits_of, history
        self._prompts: dict[int, _Scored] = {}

    def apply(self, plan: StepPlan) -> None:
        if self._prompts:
            for slot in plan.released.tolist():
                self._prompts.pop(slot, None)
        for a in plan.admitted:
            if a.sampler.num_prompt_logprobs is not None:
                self._prompts[a.slot] = _Scored(a.sampler, a.num_computed)

    def run(self, plan: StepPlan, hidden: Tensor) -> Results | None:
        asked = np.flatnonzero(plan.outputs & PROMPT_LOGPROBS).tolist() if self._prompts else ()
        if not asked:
            return None
        ends, parts = np.cumsum(plan.num_tokens), dict[int, list[list[Tensor]]]()
        for i in asked:
            slot, count = int(plan.slots[i]), int(plan.num_rows[i])
            if rows := self._rows(slot, hidden[int(ends[i]) - count : int(ends[i])]):
                parts[slot] = rows
        return lambda: self._results(parts)

    def _rows(self, slot: int, hidden: Tensor) -> list[list[Tensor]]:
        """Launch the scores of the next rows of a slot's prompt and their copies to the host, in parts of SCORE_ROWS.
        """
        prompt = self._prompts[slot]
        first, k = prompt.computed, prompt.spec.num_prompt_logprobs
        prompt.computed += len(hidden)
        rows = min(len(hidden), prompt.spec.num_prompt - 1 - first)
        assert k is not None
        targets = self._history[slot, first + 1 : first + 1 + rows].long()
        found = []
        for at in range(0, rows, SCORE_ROWS):
            part = slice(at, min(at + SCORE_ROWS, rows))
            found.append([back(one) for one in score_rows(self._logits_of(hidden[part]), targets[part], k)])
        return found

    @staticmethod
    def _results(parts: dict[int, list[list[Tensor]]]) -> Found:
        scored = {
            slot: joined([RowLogprobs(*(one.numpy() for one in part)) for part in some]) for slot, some in parts.items()
        }
        failed = {slot: "nan_logits" for slot, rows in scored.items() if np.isnan(rows.logprobs[:, 0]).any()}
        return {"prompt_logprobs": scored, "failed": failed}


def score_samples(logits: Tensor, slots: list[int], specs: Mapping[int, SamplerSpec], tokens: Tensor) -> Results | None:
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


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy `numbers` to an int64 tensor on the device, without waiting for the device."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def back(values: Tensor) -> Tensor:
    """Start the copy of `values` to the host. Return the host tensor; it is valid once the device has made the copy."""
    out = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda and values.numel() <= PINNED)
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
    """Concatenate log-probabilities of rows: the rows of all parts, in order."""
    return RowLogprobs(*map(np.concatenate, zip(*((p.ids, p.logprobs, p.ranks) for p in parts), strict=True)))

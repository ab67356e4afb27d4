"""Log-probabilities of prompt tokens, from the hidden states of a step."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import PROMPT_LOGPROBS, RowLogprobs, StepPlan
from quire.kernels.host_copies import back
from quire.kernels.sampling.logprobs import score_rows
from quire.kernels.sampling.sampled import joined
from quire.kernels.step.upload import Change
from quire.worker.features import Found, Results, StepFeature

SCORE_ROWS = 64  # prompt rows whose logits exist at once: 64 x 152k x 4 bytes = 39 MB


@dataclass
class _Scored:
    """The prompt of a slot whose rows are scored; `computed`: its tokens computed so far."""

    spec: SamplerSpec
    computed: int


class PromptScorer(StepFeature):
    """Computes log-probabilities of prompt tokens.

    The hidden state of a token scores the next token of the prompt. That of the prompt's last token scores nothing.

    logits_of  hidden states [R, hidden] before the final norm, of a slot's prompt -> logits [R, V] float32
    history    [slots, L] int32 token ids by position
    """

    def __init__(self, logits_of: Callable[[Tensor, int], Tensor], history: Tensor) -> None:
        self._logits_of, self._history = logits_of, history
        self._prompts: dict[int, _Scored] = {}

    def apply(self, plan: StepPlan) -> list[Change]:
        if self._prompts:
            for slot in plan.released.tolist():
                self._prompts.pop(slot, None)
        for a in plan.admitted:
            if a.sampler.num_prompt_logprobs is not None:
                self._prompts[a.slot] = _Scored(a.sampler, a.num_computed)
        return []

    def computed(self, plan: StepPlan, hidden: Tensor) -> Results | None:
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
        """Launch the scores of the next rows of a slot's prompt and their copies to the host, SCORE_ROWS at a time."""
        prompt = self._prompts[slot]
        first, k = prompt.computed, prompt.spec.num_prompt_logprobs
        prompt.computed += len(hidden)
        rows = min(len(hidden), prompt.spec.num_prompt - 1 - first)
        assert k is not None
        targets = self._history[slot, first + 1 : first + 1 + rows].long()
        found = []
        for at in range(0, rows, SCORE_ROWS):
            part = slice(at, min(at + SCORE_ROWS, rows))
            found.append([back(one) for one in score_rows(self._logits_of(hidden[part], slot), targets[part], k)])
        return found

    @staticmethod
    def _results(parts: dict[int, list[list[Tensor]]]) -> Found:
        scored = {
            slot: joined([RowLogprobs(*(one.numpy() for one in part)) for part in some]) for slot, some in parts.items()
        }
        failed = {slot: "nan_logits" for slot, rows in scored.items() if np.isnan(rows.logprobs[:, 0]).any()}
        return {"prompt_logprobs": scored, "failed": failed}

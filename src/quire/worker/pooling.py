"""Pooling: one vector per embedding request, from the hidden states of its prompt.

Each step sums hidden states by slot, after the final norm, in float32. The sum of a prompt's earlier chunks stays on
the device until the prompt ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import F32, POOL, StepPlan
from quire.kernels.host_copies import back, sent
from quire.kernels.step.upload import Change
from quire.worker.features import Found, Results, StepFeature


@dataclass
class _Prompt:
    """The prompt of a slot that is pooled.

    method     "mean", "cls" (first token) or "last" (last token)
    length     tokens of the prompt;  computed  tokens of the prompt that are computed so far
    total      [hidden] float32 sum over the chunks so far; None before the first
    """

    method: str
    length: int
    computed: int
    total: Tensor | None = None

    def rows(self, first: int, count: int) -> range:
        """Return the rows of a prompt chunk that pooling sums: all for "mean", at most one for "cls" and "last".

        The chunk has the rows first .. first + count - 1 of the step. Its tokens are counted as computed.
        """
        begins, self.computed = self.computed == 0, self.computed + count
        if self.method == "mean":
            return range(first, first + count)
        end = first + count
        return range(first, first + begins) if self.method == "cls" else range(end - self.ended, end)

    @property
    def ended(self) -> bool:
        """True when the chunks so far contain all tokens of the prompt."""
        return self.computed == self.length


class Pooler(StepFeature):
    """Pools the hidden states of each embedding request's prompt into one vector.

    norm   the model's final norm, [R, hidden] -> [R, hidden]; it is applied before pooling
    """

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        self._norm = norm
        self._prompts: dict[int, _Prompt] = {}

    def apply(self, plan: StepPlan) -> list[Change]:
        if self._prompts:
            for slot in plan.released.tolist():
                self._prompts.pop(slot, None)
        for a in plan.admitted:
            if a.pool:
                self._prompts[a.slot] = _Prompt(a.pool, a.sampler.num_prompt, a.num_computed)
        return []

    def computed(self, plan: StepPlan, hidden: Tensor) -> Results | None:
        """Launch the sums of this step's hidden states, one sum per embedding request.

        Returns a function that gives the vectors of the prompts that end in this step; None if no prompt ends.
        """
        asked = np.flatnonzero(plan.outputs & POOL).tolist() if self._prompts else ()
        if not asked:
            return None
        prompts = [self._prompts[int(plan.slots[i])] for i in asked]
        counts, starts = plan.num_tokens[asked].tolist(), (np.cumsum(plan.num_tokens) - plan.num_tokens)[asked].tolist()
        spans = [prompt.rows(*place) for prompt, *place in zip(prompts, starts, counts, strict=True)]
        sums, ended = self._sums(spans, hidden), dict[int, tuple[int, int]]()
        for row, prompt in enumerate(prompts):
            if prompt.total is not None:
                sums[row] += prompt.total
            if prompt.ended:
                ended[int(plan.slots[asked[row]])] = row, prompt.length if prompt.method == "mean" else 1
            else:
                prompt.total = sums[row].clone()
        if not ended:
            return None
        host = back(sums)
        return lambda: _found({slot: host[row].numpy() / np.float32(count) for slot, (row, count) in ended.items()})

    def _sums(self, spans: list[range], hidden: Tensor) -> Tensor:
        """Return the sums [S, hidden] float32 over S spans of rows; an empty span sums to 0."""
        device, rows = hidden.device, [row for span in spans for row in span]
        if not rows:
            return torch.zeros((len(spans), hidden.shape[1]), device=device)
        ends, states = sent(np.cumsum([0, *map(len, spans)]).tolist(), device), self._norm(hidden[sent(rows, device)])
        # Without `unsafe` PyTorch waits for the device to check the ends.
        return torch.segment_reduce(states.float(), "sum", offsets=ends, axis=0, unsafe=True)


def _found(vectors: dict[int, F32]) -> Found:
    failed = {slot: "nan_hidden" for slot, vector in vectors.items() if not np.isfinite(vector).all()}
    return {"pooled": vectors, "failed": failed}

"""Prompts that are given as embeddings: their rows replace the rows of the model's embedding."""

from dataclasses import dataclass, replace

from torch import Tensor

from quire.contracts.step import F32, StepPlan
from quire.kernels.host_copies import sent_array
from quire.kernels.step.upload import Change
from quire.layers.context import StepContext
from quire.worker.features import Layers, StepFeature
from quire.worker.recorder import StepShape


@dataclass
class _Prompt:
    """The embeddings [P, hidden] of a slot's prompt, and the number of its tokens that are computed so far."""

    rows: F32
    computed: int


class PromptEmbeds(StepFeature):
    """Writes the given rows of a step with such prompts over the input of its layers. Such a step runs eagerly, on all
    stages of a pipeline.

    first   True: this stage has the first layer
    """

    def __init__(self, *, first: bool) -> None:
        self._first = first
        self._prompts: dict[int, _Prompt] = {}
        self._writes: list[tuple[int, F32]] = []  # (first row, rows) of the step

    def apply(self, plan: StepPlan) -> list[Change]:
        """Note the rows of the step. A resumed request has generated tokens behind its prompt."""
        self._writes = []
        if self._prompts:
            for slot in plan.released.tolist():
                self._prompts.pop(slot, None)
        for a in plan.admitted:
            if a.embeds is not None:
                self._prompts[a.slot] = _Prompt(a.embeds, a.num_computed)
        first = 0
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True) if self._prompts else ():
            prompt = self._prompts.get(slot)
            if prompt is not None and prompt.computed < len(prompt.rows):
                self._writes.append((first, prompt.rows[prompt.computed : prompt.computed + count]))
                prompt.computed += count
            first += count
        return []

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the shape; a step with given rows runs eagerly."""
        return replace(shape, eager=True) if self._writes else shape

    def run_layers(self, plan: StepPlan, hidden: Tensor, ctx: StepContext, layers: Layers) -> Tensor | None:
        """Write the given rows over hidden [T, hidden]. Others run the layers."""
        if self._first:
            self.write(hidden)
        return None

    def write(self, embeddings: Tensor) -> None:
        """Write the given rows of the step over embeddings [T, hidden] of its tokens."""
        for first, rows in self._writes:
            embeddings[first : first + len(rows)] = sent_array(rows.copy(), embeddings.device).to(embeddings.dtype)

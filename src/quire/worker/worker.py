"""One worker: a device with a model, a KV arena and the slot tables, which runs plans in order."""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from quire.contracts.step import I32, NO_MASKS, StepPlan, StepResult, StepTimings
from quire.kernels.attention import AttentionMeta, KVView
from quire.layers.context import StepContext
from quire.layers.stack import Model, Tap, run_layers
from quire.worker.inputs import StepInputs, build_inputs
from quire.worker.pooling import Pooler, unsound
from quire.worker.sampler import SampleOutput, Sampler
from quire.worker.scoring import Scored, score_prompts, unscorable
from quire.worker.slots import SlotTables
from quire.worker.tapes import LayerTapes


class LogitsTap(Protocol):
    """Sees the logits [N, V] of the sampled rows, with their slots and positions (tests, verification)."""

    def __call__(self, slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        """One call per step."""


class Worker:
    """Runs plans: tables, inputs, forward pass, sampling."""

    def __init__(
        self, model: Model, kv_views: list[KVView], tables: SlotTables, sampler: Sampler, *, block_size: int
    ) -> None:
        self.model = model
        self.tables = tables
        self.sampler = sampler
        self.on_logits: LogitsTap | None = None
        self.on_hidden: Tap | None = None
        self._kv_views = kv_views
        self._block_size = block_size
        self._tapes = LayerTapes(model)
        self._pooler = Pooler(model.norm)

    @torch.inference_mode()
    def run(self, plan: StepPlan, late: Callable[[], I32] = lambda: NO_MASKS) -> StepResult:
        """Run one plan to its end. `late` waits for its masks, see `Executor.release`; asked when it has any."""
        assert plan.num_tokens[: plan.num_decodes].max(initial=1) == 1, "this worker verifies no drafts"
        began = time.perf_counter()
        self.tables.apply(plan)
        self._pooler.apply(plan)
        inputs = build_inputs(plan, self.tables, self._block_size)
        hidden = self._forward(inputs)
        logits = self._logits(hidden[inputs.sample_rows])
        forward_done = time.perf_counter()
        if self.on_logits is not None:
            self.on_logits(inputs.sample_slots, inputs.sample_positions, logits)
        history = self.tables.sampling.history
        # None come to a step that is shut down.
        masks = dict(zip(plan.grammar.tolist(), late(), strict=False)) if len(plan.grammar) else {}
        out = self.sampler.sample(logits, inputs.sample_slots, inputs.sample_positions, history, masks)
        self.tables.advance(inputs.slots, inputs.seq_lens)
        self.tables.sampling.append(inputs.sample_slots, inputs.sample_positions, out.tokens)
        return self._read_back(plan, inputs, hidden, logits, out, times=(began, forward_done))

    def _read_back(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        out: SampleOutput,
        *,
        times: tuple[float, float],
    ) -> StepResult:
        """Wait for what the step computed: the one place that takes results off the device."""
        began, forward_done = times
        rows = [Scored(slot, first, count, int(inputs.seq_lens[i]) - count, self.tables.sampling.specs[slot])
                for i, slot, first, count in inputs.scored]  # fmt: skip
        scored = score_prompts(rows, hidden, self._logits, self.tables.sampling.history)
        slots = inputs.sample_slots.int().cpu().numpy()
        if pooled := self._pooler.run(plan, hidden):
            inputs.seq_lens.cpu()  # waits: never empty
        vectors = pooled() if pooled else {}
        return StepResult(
            step=plan.step,
            slots=slots,
            tokens=out.tokens.int().cpu().numpy()[:, None],
            num_accepted=np.ones(len(slots), np.int32),
            failed={int(slots[row]): code for row, code in out.failed.items()} | unscorable(scored)
            | unsound(vectors),
            logprobs=self.sampler.logprobs(logits, inputs.sample_slots, out.tokens),
            prompt_logprobs=scored,
            pooled=vectors,
            num_computed=len(inputs.token_ids),
            timings=StepTimings(forward=forward_done - began, sample=time.perf_counter() - forward_done),
        )

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        meta = AttentionMeta(
            query_start=inputs.query_start.int(),
            seq_lens=inputs.seq_lens.int(),
            block_tables=inputs.block_tables,
            kv_slots=inputs.kv_slots,
        )
        ctx = StepContext(positions=inputs.positions, attention=meta, kv=self._kv_views)
        hidden = self.model.embed(inputs.token_ids)
        if self.on_hidden is not None:
            return run_layers(self.model, hidden, ctx, tap=self.on_hidden)
        return self._tapes.run(hidden, ctx)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.head(self.model.norm(hidden))

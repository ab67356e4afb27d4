"""The launches of a step: inputs and layers, the head, sampling, and the write-back of the sampled tokens.

No code here reads a value that the device computed. Recorded parts get the sizes of a step and no plan.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.attention import AttentionMeta, KVView, Prompt, SharedBlocks
from quire.kernels.sampling.rows import Mode
from quire.kernels.sampling.sampler import Sampler
from quire.kernels.step import StepBuffers
from quire.kernels.step.state import DeviceState, Limits, zeros
from quire.kernels.step.upload import SHARED_GROUPS, Upload
from quire.layers.context import StepContext
from quire.layers.stack import Model, embedded, entered
from quire.worker.features import Features
from quire.worker.recorder import Key, Recorder, StepShape


class Programs:
    """Launches the parts of a step: inputs, layers, head, sampling. The recorder replays parts that it has recorded.

    operations  implementation of the kernels in `kernels/step`, which build a step's inputs and write its tokens
    features    step features, whose hooks the programs call
    out         [3, max_rows] int32: sampled tokens, error codes and drafts of the sampled rows, of the last step
    some        indices of the layers to run
    """

    def __init__(
        self,
        model: Model,
        kv: list[KVView],
        state: DeviceState,
        *,
        upload: Upload,
        operations: ModuleType,
        sampler: Sampler,
        recorder: Recorder,
        features: Features,
        limits: Limits,
    ) -> None:
        self.model, self.sampler, self.recorder, self.features = model, sampler, recorder, features
        self.some: Sequence[int] = range(len(model.layers))
        self.kv, self._state, self._upload, self.operations = kv, state, upload, operations
        self._limits = limits
        groups = zip(limits.windows, limits.block_sizes, strict=True)
        self._shares = [window is None and size == limits.shared_size for window, size in groups]
        rows, device = len(state.buffers.sample_rows), state.tables.computed.device
        self.out = zeros(3, rows, dtype=torch.int32, device=device)
        # A stage without the head writes zeros, and the first stage gets the tokens later.
        self._unknown = zeros(rows, device=device), zeros(rows, dtype=torch.uint8, device=device)
        vocab = model.vocabulary.count if model.vocabulary else model.args.vocab_size
        # Of the last step. A recorder with static logits has them in this memory, else each step has its own.
        self._logits = zeros(rows if recorder.static else 0, vocab, dtype=torch.float32, device=device)
        self._hidden: dict[Key, Tensor] = {}  # hidden states of recorded steps with prompts
        self._cuts: dict[tuple[int, int], StepBuffers] = {}  # of decode steps, by the numbers of tokens and decodes

    def shape(self, plan: StepPlan) -> StepShape:
        """Return the sizes that a step runs with, padded to a CUDA graph's if one fits. Call it after `Upload.send`."""
        step = self._upload.step
        decode = plan.num_decodes == len(plan.slots)
        query = 1 if step.num_verified == plan.num_decodes else int(plan.num_tokens[: plan.num_decodes].max())
        assert query <= 1 + self._limits.num_drafts, "more drafts than this runner has room for"
        tokens, seqs, rows = step.num_tokens, step.num_seqs, step.num_rows
        context = self._state.longest(plan.slots) if decode and 0 < len(plan.slots) <= self._limits.short[0] else 0
        return self._fit(plan, StepShape(tokens, seqs, rows, decode, self._upload.shared, query=query, context=context))

    def _fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        for feature in self.features.fit:
            shape = feature.fit(plan, shape)
        return shape if shape.eager else self.recorder.fit(shape)

    def compute(self, shape: StepShape, plan: StepPlan) -> Tensor | None:
        """Launch everything up to the logits. Return the hidden states [>= tokens, hidden] of a step with prompts;
        None for a decode step."""
        for late in self.features.late:
            for begin, seqs in late.overdue(plan, shape):
                size = self.recorder.fit(StepShape(seqs, seqs, seqs, True)).seqs if not begin else seqs
                self.recorder.run(("late", size, begin), partial(self.catch_up, begin, size))
        if not shape.recorded:
            hidden = self.layers(shape, plan)
        elif shape.decode:
            self.recorder.run(shape.key, partial(self.decode, shape))
            return None
        else:
            self.recorder.run(shape.key, partial(self.mixed, shape))
            hidden = self._hidden[shape.key]
        if shape.rows and self.model.last:
            self.head(hidden if shape.decode else hidden[self._state.buffers.sample_rows[: shape.rows]], shape)
        return None if shape.decode else hidden

    def end(self, shape: StepShape, slots: I32) -> None:
        """Launch the sampling from the logits of `compute`, and write the tokens to the requests' history and `out`.

        slots   [R] int32: slot of each sampled row, in order
        """
        for feature in self.features.logits if len(slots) and self.model.last else ():
            count, buffers = len(slots), self._state.buffers
            feature.logits(buffers.sample_slots[:count], buffers.sample_positions[:count], self.whole_logits(count))
        mode = self.sampler.table.mode(slots)
        self.recorder.run(("sample", shape.rows, mode), partial(self.sample, shape.rows, mode))

    def logits(self, rows: int) -> Tensor:
        """Return this rank's logits [rows, V] of the first sampled rows; valid until the next step's `compute`."""
        return self._logits if len(self._logits) == rows else self._logits[:rows]

    def whole_logits(self, rows: int) -> Tensor:
        """Gather the logits of the first sampled rows for the whole vocabulary. Every rank must call this."""
        logits, vocabulary = self.logits(rows), self.model.vocabulary
        return logits if vocabulary is None else vocabulary.whole(logits)

    def catch_up(self, begin: int, seqs: int) -> None:
        """Launch work that earlier steps have put off, behind the table changes. A recorder captures these launches."""
        self._begin_step()
        for late in self.features.late:
            late.catch_up(self._upload.step, self._state.tables, begin, seqs)

    def decode(self, shape: StepShape) -> None:
        """Launch a decode step of the sizes `shape`, up to its logits. A recorder captures these launches."""
        hidden = self.layers(shape, None)
        if self.model.last:
            self.head(hidden, shape)

    def mixed(self, shape: StepShape) -> None:
        """Launch the layers of a step with prompts, of the sizes `shape`, and keep the output for `compute`.

        A recorder captures these launches.
        """
        self._hidden[shape.key] = self.layers(shape, None)

    def head(self, sampled: Tensor, shape: StepShape) -> None:
        """Launch the final norm and the head: hidden states [R, hidden] -> logits [R, V]."""
        static = self.recorder.static
        rows = next(filter(None, (of(shape) for of in self.features.heads)), None)
        logits = self.model.head(self.model.norm(sampled), self._logits[: len(sampled)] if static else None, rows)
        if not static:
            self._logits = logits

    def sample(self, rows: int, mode: Mode) -> None:
        """Launch the end of a step: sample the first `rows` rows (0: none), write the tokens to the token history."""
        state, sampler = self._state, self.sampler
        tokens, codes = self._unknown
        if self.model.last:
            if rows:
                sampler.sample(self.logits(rows), mode)
            tokens, codes = sampler.tokens, sampler.codes
        for feature in self.features.sampled if rows else ():
            feature.sampled(self._upload.step, state.tables, state.buffers, tokens, rows)
        self.operations.finish_step(self._upload.step, state.tables, state.buffers, tokens, codes, self.out)

    def layers(self, shape: StepShape, plan: StepPlan | None) -> Tensor:
        """Launch everything before the final norm and the head: table changes, inputs, embedding and layers.

        Returns the hidden states [tokens, hidden]. The sizes in `shape` may be larger than those of the step. `plan` is
        None for a recorded step.
        """
        step, state = self._upload.step, self._state
        self._begin_step()
        buffers, longest, most = self._cut(shape), shape.tokens, state.tables.block_tables.shape[2]
        prompts: tuple[Prompt, ...] = ()
        if plan is not None:
            longest, most = int(plan.num_tokens.max()), state.most_blocks(plan.slots)
            prompts = state.prompts(plan)
        for feature in self.features.inputs:
            feature.inputs(step, state.tables, shape)
        self.operations.build_inputs(step, state.tables, buffers)
        shared = SharedBlocks.view(step.shared, SHARED_GROUPS, step.max_seqs, shape.seqs) if shape.shared else None
        groups, few = [], 1 + self._limits.num_drafts  # kernels are compiled for the most rows of a decode
        for group, kv_slots in enumerate(buffers.kv_slots):
            block_tables, table_rows = self.operations.gather_blocks(step, state.tables, group, shape.seqs, most)
            groups.append(
                AttentionMeta(
                    query_start=step.starts[: shape.seqs + 1],
                    seq_lens=buffers.seq_lens,
                    block_tables=block_tables,
                    kv_slots=kv_slots,
                    table_rows=table_rows,
                    max_query_len=shape.query if shape.decode else max(longest, few),
                    most_context=shape.context or None,
                    decode_len=shape.query if shape.decode else few,
                    shared=shared if self._shares[group] else None,
                    prompts=prompts,
                    kv_group=group,
                )
            )
        live = buffers.live if shape.recorded or shape.query > 1 else None  # else all rows count
        ctx = StepContext(buffers.positions, tuple(groups), self.kv, live=live)
        for feature in self.features.context:
            ctx = feature.context(ctx, shape)
        hidden = self._run_layers(buffers.token_ids, ctx, plan)
        for feature in self.features.layers_done:
            feature.layers_done(step, buffers, hidden, ctx, shape)
        return hidden

    def _begin_step(self) -> None:
        """Prepare for exchanges, and launch the table changes: twice in a step they do the same."""
        if self.model.vocabulary is not None:
            self.model.vocabulary.group.begin_step()
        self._upload.apply()

    def _run_layers(self, token_ids: Tensor, ctx: StepContext, plan: StepPlan | None) -> Tensor:
        """Run the embedding and the layers, or the features that stand in their place."""
        if self.features.embed:
            hidden = self.features.embed[0].embed(token_ids)
            hidden = entered(self.model, hidden, ctx) if self.model.first else hidden
        else:
            hidden, ctx = embedded(self.model, token_ids, ctx)
        for feature in self.features.run_layers:
            if plan is not None and (ran := feature.run_layers(plan, hidden, ctx, self.some)) is not None:
                return ran
        return self.recorder.run_layers(self.model, hidden, ctx, self.some)

    def idle(self, plan: StepPlan) -> None:
        """Launch a step without tokens here: the table changes, and this rank's part in the steps of other replicas."""
        self._upload.apply()
        if plan.joins and self.features.join:
            shape = self._fit(plan, StepShape(0, 0, 0, True))
            self.recorder.run(shape.key, partial(self.join, shape))

    def join(self, shape: StepShape) -> None:
        """Launch this rank's part in a step in which it has no tokens. A recorder captures these launches."""
        for feature in self.features.join:
            feature.join(shape, self.some)

    def _cut(self, shape: StepShape) -> StepBuffers:
        """Return the step's buffers, cut to its sizes.

        A step with prompts on static buffers gets all rows: its recording does not know its rows.
        """
        if not shape.decode:
            rows = len(self._logits) if self.recorder.static else shape.rows
            return self._state.buffers.cut(shape.tokens, shape.seqs, rows)
        known = self._cuts.get((shape.tokens, shape.seqs))
        if known is None:
            known = self._state.buffers.cut(shape.tokens, shape.seqs, shape.tokens)
            self._cuts[shape.tokens, shape.seqs] = known
        return known

    def recordings(self, shapes: list[StepShape]) -> Iterator[tuple[Key, Callable[[], None]]]:
        """Yield (key, work) of every CUDA graph or recording to make; `shapes` come from `Recorder.shapes`.

        `work` launches what is recorded: the layers of a step with prompts; the layers and the head of a decode step.
        After each pair of decode shapes (without and with a shared prefix) come the recordings of sampling for that
        many rows, one per sampling mode.
        """
        sampled = set[int]()
        for shape in shapes:
            work = self.join if not shape.tokens else self.decode if shape.decode else self.mixed
            yield shape.key, partial(work, shape)
            first = not (shape.shared or shape.adapted or shape.context)  # of the shapes of this size
            if shape.tokens and shape.decode and shape.query == 1 and first:
                if any(late.most >= shape.seqs for late in self.features.late):
                    yield ("late", shape.seqs, 0), partial(self.catch_up, 0, shape.seqs)
            if shape.decode and shape.shared and shape.rows not in sampled:
                sampled.add(shape.rows)
                for mode in Mode:
                    yield ("sample", shape.rows, mode), partial(self.sample, shape.rows, mode)

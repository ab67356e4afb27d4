"""The launches of a step: inputs and layers, the head, sampling, and the write-back of the sampled tokens.

No code here reads a value that the device computed. Recorded parts get the sizes of a step and no plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.attention import AttentionMeta, KVView, Prompt, SharedBlocks
from quire.kernels.sampling.rows import Mode
from quire.kernels.sampling.sampler import Sampler
from quire.kernels.step import NUM_TOKENS, StepBuffers
from quire.kernels.step.state import DeviceState, Limits, zeros
from quire.kernels.step.synthetic import SyntheticAcceptance
from quire.kernels.step.upload import SHARED_GROUPS, Upload
from quire.layers.context import ReplicaTokens, StepContext
from quire.layers.stack import Model, Tap, join_layers, run_layers
from quire.spec.drafter import Drafter
from quire.worker.blending import Blending
from quire.worker.recorder import Key, Recorder, StepShape
from quire.worker.stage import PipelineStage

LogitsTap = Callable[[Tensor, Tensor, Tensor], None]  # for tests: slots [N], positions [N] and logits [N, V] of a step


class Programs:
    """Launches the parts of a step: inputs, layers, head, sampling. The recorder replays parts that it has recorded.

    operations  implementation of the kernels in `kernels/step`, which build a step's inputs and write its tokens
    out         [3, max_rows] int32: sampled tokens, error codes and drafts of the sampled rows, of the last step
    on_hidden   callback for the hidden states of each layer; all steps run eagerly while it is set
    on_logits   callback for the logits of the sampled rows, once per step that samples
    some        indices of the layers to run; None: all
    replicas    tokens of the replicas in lock-step in the step that is being launched; None: there are no others
    stage       the neighbours in a pipeline; None: this rank has all layers
    drafter     guesses tokens for decodes to verify; None: no step has drafts
    synthetic   decides which drafts count, for measurements; None: those that are right
    blending    runs the layers of steps that reuse KV of other positions; None: no step does
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
        stage: PipelineStage | None = None,
        drafter: Drafter | None = None,
        limits: Limits,
    ) -> None:
        self.model, self.sampler, self.recorder, self.stage = model, sampler, recorder, stage
        self.drafter = drafter
        self.synthetic: SyntheticAcceptance | None = None
        self.blending = None if model.kernels.blend is None else Blending(model, kv)
        self.on_hidden: Tap | None = None
        self.on_logits: LogitsTap | None = None
        self.some: list[int] | None = None
        self.kv, self._state, self._upload, self.operations = kv, state, upload, operations
        self._windows, self._limits = limits.windows, limits
        self.replicas: ReplicaTokens | None = None
        if limits.replicas > 1:
            count = upload.step.words[NUM_TOKENS : NUM_TOKENS + 1]
            self.replicas = ReplicaTokens((0,) * limits.replicas, count, max(limits.bounds, default=0))
        rows, device = len(state.buffers.sample_rows), state.tables.computed.device
        self.out = zeros(3, rows, dtype=torch.int32, device=device)
        # A stage without the head writes zeros, and the first stage gets the tokens later.
        self._unknown = zeros(rows, device=device), zeros(rows, dtype=torch.uint8, device=device)
        vocab = model.vocabulary.count if model.vocabulary else model.args.vocab_size
        self._static = zeros(rows, vocab, dtype=torch.float32, device=device) if recorder.static else None
        self._logits: Tensor | None = None  # of the last step, unless they are static
        self._hidden: dict[Key, Tensor] = {}  # hidden states of recorded steps with prompts
        self._cuts: dict[tuple[int, int], StepBuffers] = {}  # of decode steps, by the numbers of tokens and decodes

    def shape(self, plan: StepPlan) -> StepShape:
        """Return the sizes that a step runs with, padded to a CUDA graph's if one fits. Call it after `Upload.send`."""
        step = self._upload.step
        decode = plan.num_decodes == len(plan.slots)
        query = 1 if step.num_verified == plan.num_decodes else int(plan.num_tokens[: plan.num_decodes].max())
        assert query <= 1 + self._limits.num_drafts, "more drafts than this runner has room for"
        exact = StepShape(
            step.num_tokens, step.num_seqs, step.num_rows, decode, self._upload.shared, bound=self._bound, query=query
        )
        return exact if self.on_hidden is not None or plan.blended else self.recorder.fit(exact)

    def agree(self, plan: StepPlan) -> None:
        """Take from a plan how many tokens each replica in lock-step has. A plan without it is the same on all of them.

        Call it after `Upload.send`.
        """
        if self.replicas is not None:
            own = (self._upload.step.num_tokens,) * self._limits.replicas
            rows, bounds = own if plan.sync is None else plan.sync.rows, self._limits.bounds
            bound = next((bound for bound in bounds if bound >= max(rows)), max(bounds, default=0))
            self.replicas = replace(self.replicas, rows=rows, bound=bound)

    @property
    def _bound(self) -> int:
        """Bound of the step's only exchange per layer; 0: exact numbers, or a layer exchanges several times."""
        return 0 if self.replicas is None or max(self.replicas.rows) > self.replicas.bound else self.replicas.bound

    def compute(self, shape: StepShape, plan: StepPlan) -> Tensor | None:
        """Launch everything up to the logits. Return the hidden states [>= tokens, hidden] of a step with prompts;
        None for a decode step."""
        if not shape.recorded:
            hidden = self.layers(shape, plan)
        elif shape.decode:
            self.recorder.run(shape.key, partial(self.decode, shape))
            return None
        else:
            self.recorder.run(shape.key, partial(self.mixed, shape))
            hidden = self._hidden[shape.key]
        if shape.rows and self.model.last:
            self.head(hidden if shape.decode else hidden[self._state.buffers.sample_rows[: shape.rows]])
        return None if shape.decode else hidden

    def end(self, shape: StepShape, slots: I32) -> None:
        """Launch the sampling from the logits of `compute`, and write the tokens to the requests' history and `out`.

        slots   [R] int32: slot of each sampled row, in order
        """
        if self.on_logits is not None and len(slots) and self.model.last:
            count, buffers = len(slots), self._state.buffers
            self.on_logits(buffers.sample_slots[:count], buffers.sample_positions[:count], self.whole_logits(count))
        mode = self.sampler.table.mode(slots)
        self.recorder.run(("sample", shape.rows, mode), partial(self.sample, shape.rows, mode))
        if self.stage is not None:
            self.stage.sampled(self._state.buffers, self.out, slots)

    def logits(self, rows: int) -> Tensor:
        """Return this rank's logits [rows, V] of the first sampled rows; valid until the next step's `compute`."""
        logits = self._logits if self._static is None else self._static
        assert logits is not None, "no row was sampled yet"
        return logits if len(logits) == rows else logits[:rows]

    def whole_logits(self, rows: int) -> Tensor:
        """Gather the logits of the first sampled rows for the whole vocabulary. Every rank must call this."""
        logits, vocabulary = self.logits(rows), self.model.vocabulary
        return logits if vocabulary is None else vocabulary.whole(logits)

    def decode(self, shape: StepShape) -> None:
        """Launch a decode step of the sizes `shape`, up to its logits. A recorder captures these launches."""
        hidden = self.layers(shape, None)
        if self.model.last:
            self.head(hidden)

    def mixed(self, shape: StepShape) -> None:
        """Launch the layers of a step with prompts, of the sizes `shape`, and keep the output for `compute`.

        A recorder captures these launches.
        """
        self._hidden[shape.key] = self.layers(shape, None)

    def head(self, sampled: Tensor) -> None:
        """Launch the final norm and the head: hidden states [R, hidden] -> logits [R, V]."""
        out = None if self._static is None else self._static[: len(sampled)]
        self._logits = self.model.head(self.model.norm(sampled), out=out)

    def sample(self, rows: int, mode: Mode) -> None:
        """Launch the end of a step: sample the first `rows` rows (0: none), write the tokens to the token history."""
        state, sampler = self._state, self.sampler
        tokens, codes = self._unknown
        if self.model.last:
            if rows:
                sampler.sample(self.logits(rows), mode)
            tokens, codes = sampler.tokens, sampler.codes
        if self.synthetic is not None and rows:
            self.synthetic.overwrite(self._upload.step, state.tables, state.buffers, tokens, rows)
        self.operations.finish_step(self._upload.step, state.tables, state.buffers, tokens, codes, self.out)

    def layers(self, shape: StepShape, plan: StepPlan | None) -> Tensor:
        """Launch everything before the final norm and the head: table changes, inputs, embedding and layers.

        Returns the hidden states [tokens, hidden]. The sizes in `shape` may be larger than those of the step. `plan` is
        None for a recorded step.
        """
        step, state, model = self._upload.step, self._state, self.model
        if model.vocabulary is not None:
            model.vocabulary.group.begin_step()
        self._upload.apply()
        buffers, longest, most = self._cut(shape), shape.tokens, state.tables.block_tables.shape[2]
        prompts: tuple[Prompt, ...] = ()
        if plan is not None:
            longest, most = int(plan.num_tokens.max()), state.most_blocks(plan.slots)
            prompts = state.prompts(plan)
        if self.drafter is not None:
            self.drafter.draft(step, state.tables, shape.seqs if shape.recorded else step.num_decodes, shape.query - 1)
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
                    decode_len=shape.query if shape.decode else few,
                    shared=shared if self._windows[group] is None else None,
                    prompts=prompts,
                )
            )
        guessed = self.synthetic is None and (shape.recorded or shape.query > 1)  # else all rows count
        live = buffers.live if guessed else None
        ctx = StepContext(buffers.positions, tuple(groups), self.kv, self._replicas(shape), live)
        hidden = model.embed(buffers.token_ids) if self.stage is None else self.stage.begin(model, buffers.token_ids)
        if plan is not None and plan.blended:
            assert self.blending is not None, "a plan with moved tokens for a runner without kernels to move them"
            hidden = self.blending.run(plan, hidden, ctx)
        elif self.on_hidden is not None:
            hidden = run_layers(model, hidden, ctx, self.some, self.on_hidden)
        else:
            hidden = self.recorder.run_layers(model, hidden, ctx, self.some)
        if self.drafter is not None:
            self.drafter.follow(step, buffers, hidden, ctx, decode=shape.decode)
        if self.stage is not None:
            self.stage.end(hidden)
        return hidden

    def join(self) -> None:
        """Launch this rank's part in the exchanges of a step without tokens here; nothing if no replica has any."""
        if self.replicas is not None and any(self.replicas.rows):
            shape = self.recorder.fit(StepShape(0, 0, 0, True, bound=self._bound))
            self.recorder.run(shape.key, partial(self.exchange, shape))

    def exchange(self, shape: StepShape) -> None:
        """Launch the exchanges of `join`. A recorder captures these launches."""
        if self.model.vocabulary is not None:
            self.model.vocabulary.group.begin_step()
        replicas = self._replicas(shape)
        assert replicas is not None, "there is no other replica"
        join_layers(self.model, replicas, self.some)

    def _replicas(self, shape: StepShape) -> ReplicaTokens | None:
        """Return the tokens of the replicas in lock-step; a recording knows their bound alone."""
        if self.replicas is None or not shape.recorded:
            return self.replicas
        rows = () if shape.bound else (shape.tokens,) * self._limits.replicas  # exact ones only in a rehearsal
        return replace(self.replicas, rows=rows, bound=shape.bound)

    def _cut(self, shape: StepShape) -> StepBuffers:
        """Return the step's buffers, cut to its sizes.

        A step with prompts on static buffers gets all rows: its recording does not know its rows.
        """
        if not shape.decode:
            rows = shape.rows if self._static is None else len(self._static)
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
            work = self.exchange if not shape.tokens else self.decode if shape.decode else self.mixed
            yield shape.key, partial(work, shape)
            if shape.decode and shape.shared and shape.rows not in sampled:
                sampled.add(shape.rows)
                for mode in Mode:
                    yield ("sample", shape.rows, mode), partial(self.sample, shape.rows, mode)

"""The worker of a CUDA device: a plan becomes one copy to the device and a few launches; nothing waits but `collect`.

Knows the order of a step on the device: tables, inputs, layers, logits, sampling, results. Everything that is launched
depends on numbers the host has anyway (which slots, how many tokens), never on what the device computed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32, PROMPT_LOGPROBS, SAMPLE, RowLogprobs, StepPlan, StepResult
from quire.kernels.attention import AttentionMeta, KVView, Prompt, SharedBlocks
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.step import StepBuffers, Tables
from quire.kernels.step import triton as step
from quire.layers.context import StepContext
from quire.layers.stack import Model, first_of_each_kind, run_layers
from quire.worker.gpu_sampler import GpuSampler, Mode
from quire.worker.graphs import Graphs, Key
from quire.worker.packed import Change, PackedSteps
from quire.worker.pooling import Pooler, Vectors, unsound
from quire.worker.sampler import CODES
from quire.worker.scoring import Scored, score_prompts, unscorable

NARROW = 256  # sequences: a captured step with prompts is made for them, and once more for as many as there can be
EAGER_TOKENS = (64, 128, 256, 512, 1024, 2048)  # kernels are cut by the number of tokens: one of each is rehearsed
SHARED_GROUPS = 8  # of decodes with a common prefix, in one step


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that buffers are made for.

    graph_sizes    sequences of the decode steps that are captured, ascending
    graph_tokens   tokens of the other steps whose layers are captured, ascending
    """

    num_slots: int
    max_tokens: int
    max_model_len: int
    block_size: int
    graph_sizes: tuple[int, ...]
    graph_tokens: tuple[int, ...]
    depth: int


@dataclass(frozen=True)
class _Running:
    """A step the device has not finished, where its results will be, and what says that they are there."""

    plan: StepPlan
    slots: I32
    out: Tensor
    done: torch.cuda.Event
    logprobs: Callable[[], dict[int, RowLogprobs]] | None
    prompt_logprobs: dict[int, RowLogprobs]
    pooled: Callable[[], Vectors] | None


class CudaWorker:
    """Runs plans in order; at most `depth` may be submitted and not collected."""

    def __init__(self, model: Model, kv: list[KVView], limits: Limits, device: torch.device) -> None:
        self.model, self.limits = model, limits
        self.graphs = Graphs()
        self._kv, self._pooler = kv, Pooler(model.norm)
        self._some: list[int] | None = None  # layers that run; None: all
        slots = limits.num_slots + 1  # the last is for padding
        max_blocks = -(-limits.max_model_len // limits.block_size) + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tables = Tables(
            block_table=zeros(slots, max_blocks, dtype=torch.int32),
            computed=zeros(slots),
            history=zeros(slots, limits.max_model_len, dtype=torch.int32),
            block_size=limits.block_size,
        )
        seqs, tokens = limits.num_slots, limits.max_tokens
        self._buffers = StepBuffers(
            token_ids=zeros(tokens), positions=zeros(tokens), kv_slots=zeros(tokens),
            seq_lens=zeros(seqs, dtype=torch.int32), sample_rows=zeros(seqs), sample_slots=zeros(seqs),
            sample_positions=zeros(seqs),
        )  # fmt: skip
        self._packed = PackedSteps(seqs, limits.num_slots, device, limits.depth,
                                   shared_words=SharedBlocks.words(SHARED_GROUPS, seqs))  # fmt: skip
        self._logits = zeros(seqs, model.args.vocab_size, dtype=torch.float32)
        self._out = zeros(2, seqs, dtype=torch.int32)
        self._hidden: dict[tuple[int, int], Tensor] = {}  # what the layers of a captured step leave
        self._results = deque(
            (torch.zeros((2, seqs), dtype=torch.int32, pin_memory=device.type == "cuda"), torch.cuda.Event())
            for _ in range(limits.depth + 1)
        )
        self._running: deque[_Running] = deque()
        self._launch_end: partial[None]  # of the step that was submitted last
        self._num_blocks = np.zeros(slots, np.int64)
        self._specs: dict[int, SamplerSpec] = {}
        self._lengths = np.zeros(slots, np.int64)  # tokens computed once everything submitted is: an upper bound
        self.sampler = GpuSampler(self._buffers.sample_slots, self._buffers.sample_positions, self.tables.history,
                                  vocab_size=model.args.vocab_size)  # fmt: skip

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launch one step; its sampling, when it needs masks, only with `release`."""
        changes = self._changes(plan)
        self._pooler.apply(plan)
        bucket = self._bucket(plan)
        shared = self._shared(plan)
        while left := self._packed.upload(plan, changes, shared):
            left = changes = self._packed.upload(None, left)
            step.apply_runs(self._packed.device)
        self._lengths[plan.slots] += plan.num_tokens
        slots = plan.slots[(plan.outputs & SAMPLE) != 0]
        num_rows, prompts, pooled = bucket, {}, None
        if bucket:
            self.graphs.run(("decode", bucket, shared is not None), lambda: self._decode(bucket, shared is not None))
        else:
            num_rows, hidden = self._forward(plan, len(slots), shared is not None)
            prompts, pooled = self._score_prompts(plan, hidden), self._pooler.run(plan, hidden)
        self._launch_end = partial(self._end, plan, slots, num_rows, prompts, pooled)
        if not len(plan.grammar):
            self._launch_end()

    @torch.inference_mode()
    def release(self, late: I32) -> None:
        """Launch the sampling of the step that was submitted last, with its masks; see `Executor.release`."""
        plan, slots, *_ = self._launch_end.args
        self.sampler.take_masks(slots, plan.grammar, late)
        self._launch_end()

    def _end(self, plan: StepPlan, slots: I32, num_rows: int, prompts: dict[int, RowLogprobs],
             pooled: Callable[[], Vectors] | None) -> None:
        """Launch what comes after the logits."""
        mode = self.sampler.mode(slots)
        self.graphs.run(("sample", num_rows, mode), lambda: self._sample(num_rows, mode))
        scored = self.sampler.logprobs(self._logits, slots)
        out, done = self._results[0]
        self._results.rotate(-1)
        out.copy_(self._out, non_blocking=True)
        done.record()
        self._running.append(_Running(plan, slots, out, done, scored, prompts, pooled))

    def collect(self) -> StepResult:
        """Wait for the oldest step that was submitted. No timings: they take two more events a step."""
        run = self._running.popleft()
        run.done.synchronize()
        count, vectors = len(run.slots), run.pooled() if run.pooled else {}
        tokens, codes = run.out[0, :count].numpy().copy(), run.out[1, :count].numpy()
        return StepResult(
            step=run.plan.step,
            slots=run.slots,
            tokens=tokens[:, None],
            num_accepted=np.ones(count, np.int32),
            failed={int(run.slots[row]): CODES[int(codes[row])] for row in np.flatnonzero(codes)}
            | unscorable(run.prompt_logprobs) | unsound(vectors),
            logprobs=run.logprobs() if run.logprobs else {},
            prompt_logprobs=run.prompt_logprobs,
            pooled=vectors,
            num_computed=int(run.plan.num_tokens.sum()),
        )

    @torch.inference_mode()
    def rehearse(self, plans: list[StepPlan]) -> None:
        """Do once what these steps and `warm_up` do, with one of all layers that are alike, and kernels that may be
        compiled and not run: no result counts."""
        slots, tokens = self.limits.num_slots, self.limits.max_tokens
        sizes = self.limits.graph_sizes or tuple(sorted({1, min(16, slots), slots}))  # else compiled while all wait
        prompts = self.limits.graph_tokens or tuple(sorted({min(count, tokens) for count in EAGER_TOKENS}))
        self._some = first_of_each_kind(zip(self.model.layers, self._kv, strict=True))
        try:
            for plan in plans:
                self.submit(plan)
                self._running.pop()
            for _, work in self._work(sizes, prompts):
                work()
        finally:
            self._some = None
        torch.cuda.synchronize()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture what can be, after a rehearsal, and run the smallest of each kind: a kernel that fails does so now.
        The tables say that all sequences are empty."""
        smallest: dict[tuple[str, int], tuple[Key, Callable[[], None]]] = {}
        for key, work in self._work(self.limits.graph_sizes, self.limits.graph_tokens):
            self.graphs.capture(key, work)
            smallest[key[0], key[2]] = key, work
        for key, work in smallest.values():
            self.graphs.run(key, work)
        torch.cuda.synchronize()

    def _work(
        self, graph_sizes: tuple[int, ...], graph_tokens: tuple[int, ...]
    ) -> Iterator[tuple[Key, Callable[[], None]]]:
        """What steps of these sizes do, and its key in `graphs`: the layers of steps with prompts, decode steps,
        sampling; each largest first."""
        narrow, most = min(NARROW, self.limits.num_slots), self.limits.num_slots
        for tokens in reversed(graph_tokens):
            wide = [(most, False)] if narrow < min(tokens, most) else []
            for seqs, shared in (*((narrow, shared) for shared in (False, True)), *wide):
                yield ("mixed", tokens, 2 * seqs + shared), partial(self._mixed, tokens, seqs, shared)
        for size in reversed(graph_sizes):
            for shared in (False, True):
                yield ("decode", size, shared), partial(self._decode, size, shared)
            for mode in self.sampler.modes:
                yield ("sample", size, mode), partial(self._sample, size, mode)

    def _shared(self, plan: StepPlan) -> I32 | None:
        """What the kernels need of the prefixes that decodes share."""
        if not plan.shared:
            return None
        members = np.zeros(self.limits.num_slots, bool)
        members[plan.slots[: plan.num_decodes]] = True
        if not any(members[group.slots].sum() > 1 for group in plan.shared):
            return None
        return pack_shared(plan.shared, plan.slots, plan.num_tokens, num_groups=SHARED_GROUPS,
                           most_seqs=self.limits.num_slots)  # fmt: skip

    def _bucket(self, plan: StepPlan) -> int:
        """The size of the graph that a step runs in; 0: it is launched one by one."""
        assert plan.num_tokens[: plan.num_decodes].max(initial=1) == 1, "this worker verifies no drafts"
        if plan.num_decodes == len(plan.slots):
            return self._round_up(len(plan.slots))
        return 0

    def _forward(self, plan: StepPlan, num_samples: int, shared: bool) -> tuple[int, Tensor]:
        """Launch a step with prompts up to the logits: how many rows of them there are, padding included, and the
        hidden states."""
        rows, tokens = self._round_up(num_samples) or num_samples, int(plan.num_tokens.sum())
        padded = next((size for size in self.limits.graph_tokens if size >= tokens), 0)
        if padded:
            seqs = NARROW if len(plan.slots) <= NARROW < self.limits.num_slots else self.limits.num_slots
            variant = 2 * seqs + shared
            self.graphs.run(("mixed", padded, variant), lambda: self._mixed(padded, seqs, shared))
            hidden = self._hidden[padded, variant]
        else:
            hidden = self._layers(tokens, max(len(plan.slots), rows), int(plan.num_tokens.max()), shared,
                                  self._prompts(plan))
        if rows:
            self._head(hidden[self._buffers.sample_rows[:rows]])
        return rows, hidden

    def _prompts(self, plan: StepPlan) -> tuple[Prompt, ...]:
        """The sequences behind the decodes; of a prompt the host knows how much of it was computed before."""
        ends = np.cumsum(plan.num_tokens)
        starts, past = ends - plan.num_tokens, self._lengths[plan.slots] - plan.num_tokens
        return tuple((int(starts[s]), int(ends[s]), s, int(past[s])) for s in range(plan.num_decodes, len(ends)))

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> dict[int, RowLogprobs]:
        """Waits for the device, in steps where somebody asked for the log-probabilities of a prompt."""
        asked = np.flatnonzero(plan.outputs & PROMPT_LOGPROBS).tolist()
        if not asked:
            return {}
        ends, scored = np.cumsum(plan.num_tokens), []
        for i in asked:
            slot, count = int(plan.slots[i]), int(plan.num_rows[i])
            position = int(self._lengths[slot]) - count  # of a prompt the bound is exact
            scored.append(Scored(slot, int(ends[i]) - count, count, position, self._specs[slot]))
        return score_prompts(scored, hidden, lambda rows: self.model.head(self.model.norm(rows)), self.tables.history)

    def _mixed(self, tokens: int, seqs: int, shared: bool) -> None:
        self._hidden[tokens, 2 * seqs + shared] = self._layers(tokens, seqs, tokens, shared)

    def _decode(self, size: int, shared: bool) -> None:
        self._head(self._layers(size, size, 1, shared))

    def _head(self, sampled: Tensor) -> None:
        self.model.head(self.model.norm(sampled), out=self._logits[: len(sampled)])

    def _sample(self, num_rows: int, mode: Mode) -> None:
        """The step's end: sampling, if there is a row, then what is remembered of it."""
        if num_rows:
            self.sampler.sample(self._logits[:num_rows], mode)
        step.finish_step(self._packed.device, self.tables, self._buffers, self.sampler.tokens, self.sampler.codes,
                         self._out, max_seqs=self.limits.num_slots)  # fmt: skip

    def _round_up(self, count: int) -> int:
        """The captured size that `count` sequences run in; 0 for none, and beyond the largest."""
        return next((size for size in self.limits.graph_sizes if size >= count > 0), 0)

    def _layers(
        self, tokens: int, seqs: int, max_query_len: int, shared: bool, prompts: tuple[Prompt, ...] = ()
    ) -> Tensor:
        """Launch everything before the head: hidden [tokens, hidden]. Sizes are upper bounds of the step's own;
        `prompts` are what the step has, so who is captured gives none."""
        packed, buffers = self._packed, self._buffers
        step.apply_runs(packed.device)
        step.build_inputs(packed.device, self.tables, buffers, tokens=tokens, seqs=seqs,
                          max_seqs=self.limits.num_slots)  # fmt: skip
        meta = AttentionMeta(
            query_start=packed.starts[: seqs + 1],
            seq_lens=buffers.seq_lens[:seqs],
            block_tables=self.tables.block_table,
            kv_slots=buffers.kv_slots[:tokens],
            table_rows=packed.slots[:seqs],
            max_query_len=max_query_len,
            shared=SharedBlocks.view(packed.shared, SHARED_GROUPS, self.limits.num_slots, seqs) if shared else None,
            prompts=prompts,
        )
        ctx = StepContext(positions=buffers.positions[:tokens], attention=meta, kv=self._kv)
        return run_layers(self.model, self.model.embed(buffers.token_ids[:tokens]), ctx, self._some)

    def _changes(self, plan: StepPlan) -> list[Change]:
        """What the plan changes in the device's tables, as words and where they go."""
        changes: list[Change] = []
        for slot in plan.released.tolist():
            self.sampler.release(slot)
        for a in plan.admitted:
            blocks, tokens = a.block_ids[0], np.ascontiguousarray(a.token_ids, np.int32)
            self._num_blocks[a.slot] = len(blocks)
            self._lengths[a.slot] = a.num_computed
            changes.append((self.tables.block_table[a.slot].data_ptr(), np.ascontiguousarray(blocks, np.int32)))
            changes.append((self.tables.history[a.slot].data_ptr(), tokens))
            computed = np.array([a.num_computed], np.int64).view(np.int32)
            changes.append((self.tables.computed[a.slot :].data_ptr(), computed))
            changes += self.sampler.admit(a.slot, a.sampler)
            self._specs[a.slot] = a.sampler
        base, stride = self.tables.block_table.data_ptr(), 4 * self.tables.block_table.stride(0)
        for slot, _group, block in plan.appended.tolist():
            at = base + slot * stride + 4 * int(self._num_blocks[slot])
            changes.append((at, np.array([block], np.int32)))
            self._num_blocks[slot] += 1
        return changes

"""The agreement of replicas in lock-step: how many tokens each of them computes in a step, and the passes of a drafter
whose layers share experts."""

from dataclasses import replace

from msgspec import structs
from torch import Tensor

from quire.contracts.step import I32, DraftSync, StepPlan, StepSync
from quire.kernels.step import NUM_TOKENS, StepBuffers, StepWords, Tables
from quire.kernels.step.state import Limits
from quire.layers.context import ReplicaTokens, StepContext
from quire.layers.stack import Model, join_layers
from quire.plan.graphs import captured_decodes
from quire.spec.joint_passes import JointPasses, StepPasses
from quire.worker.features import Layers, StepFeature
from quire.worker.recorder import StepShape


class ReplicaAgreement(StepFeature):
    """Tells the layers how many tokens each replica has, and takes part in exchanges of steps without tokens here.

    words    inputs of the step, on the device
    passes   passes of a drafter whose layers share experts with other replicas; None: there is none
    late     True: drafts are made at the end of a step, by `StageDrafts`
    """

    def __init__(
        self, model: Model, words: StepWords, limits: Limits, passes: JointPasses | None = None, *, late: bool = False
    ) -> None:
        self._model, self._words, self._limits, self._passes, self._late = model, words, limits, passes, late
        self._exchanges = limits.exchanges
        self.parts = () if passes is None else (passes,)
        count = words.words[NUM_TOKENS : NUM_TOKENS + 1]
        self._tokens = ReplicaTokens((0,) * self._exchanges.replicas, count, max(self._exchanges.bounds, default=0))
        self._step = StepPasses()
        self._most = 0, 0  # of this step, see `StepSync.decode`
        self._width = 1 + limits.num_drafts if self._exchanges.joint else 0  # most rows of a decode in a pass

    def before(self, plan: StepPlan) -> None:
        """Take the tokens of each replica from the plan. A plan without them is the same on all replicas."""
        sync, bounds = plan.sync or self._alike(plan), self._exchanges.bounds
        drafts = sync.drafts or DraftSync(0, (0,) * len(sync.rows), (False,) * len(sync.rows))
        if self._exchanges.even:
            self._most = sync.decode
            seqs, query = self._size()
            bound, room = seqs * query, seqs * max(query, self._width)
            once = bound > 0
        else:
            most, seqs = max(*sync.rows, *(self._width * decodes for decodes in drafts.decodes)), 0
            bound = room = next((bound for bound in bounds if bound >= most), max(bounds, default=0))
            once = bool(bounds) and most <= bound
        self._tokens = replace(self._tokens, rows=sync.rows, bound=bound)
        if once and self._exchanges.joint and not self._late:
            drafts = self._recorded(drafts)
        self._step = StepPasses(drafts, sync.rows, room, seqs, once, len(plan.slots) > plan.num_decodes)
        self._take(self._step)

    def _size(self) -> tuple[int, int]:
        """Return the captured (decodes, tokens of one) that hold those of every replica; (0, 0): none do."""
        limits, (seqs, query) = self._limits, self._most
        size = next((one for one in limits.graph_sizes if one >= seqs > 0), 0)
        found = size, next((one for one in limits.queries if one >= query), 0)
        return found if found in captured_decodes(limits.graph_sizes, limits.queries) else (0, 0)

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the shape with the bound of the step's only exchange per layer, and the drafts of all replicas.

        Bound 0: exact numbers are exchanged, or a layer exchanges several times.
        """
        if not self._step.once:
            return replace(shape, bound=0)
        query = shape.query if self._passes is None or self._late else max(shape.query, 1 + self._passes.count)
        return replace(shape, bound=self._tokens.bound, query=query, most=self._most)

    def inputs(self, step: StepWords, tables: Tables, shape: StepShape) -> None:
        """Let the drafter make the passes of a recording. Recorded."""
        if shape.recorded:
            self._take(self._of_recording(shape))

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context with the tokens of all replicas."""
        return replace(ctx, replicas=self._of(shape))

    def after(self, plan: StepPlan, rows: I32, buffers: StepBuffers, out: Tensor) -> None:
        """Join the pass over prompts of other replicas, which no recording of a step without prompts has."""
        self._take(self._step)
        if self._passes is not None:
            self._passes.join_prompts()

    def join(self, shape: StepShape, layers: Layers) -> None:
        """Launch the exchanges of layers with experts, for the tokens of other replicas."""
        if self._model.vocabulary is not None:
            self._model.vocabulary.group.begin_step()
        if self._passes is not None and not self._late:
            self._take(self._of_recording(shape) if shape.recorded else self._step)
            self._passes.join_drafts()
        join_layers(self._model, self._of(shape), layers)

    def _take(self, step: StepPasses) -> None:
        if self._passes is not None:
            self._passes.take(step)

    def _of(self, shape: StepShape) -> ReplicaTokens:
        """Return the tokens of the replicas; a recording knows their bound alone."""
        if not shape.recorded:
            return self._tokens
        rows = () if shape.bound else (shape.tokens,) * self._exchanges.replicas  # exact ones only in a rehearsal
        return replace(self._tokens, rows=rows, bound=shape.bound)

    def _alike(self, plan: StepPlan) -> StepSync:
        """Return the record of a step in which all replicas have the same plan."""
        count, runs = self._exchanges.replicas, plan.features.runs
        decodes, most = plan.num_decodes, int(plan.num_tokens[: plan.num_decodes].max(initial=1)) - 1
        if self._late:
            decodes, most = (0, 0) if runs is None else (runs.num_drafting, runs.most)
        prompts = len(plan.slots) > plan.num_decodes
        return StepSync((self._words.num_tokens,) * count, -1, DraftSync(most, (decodes,) * count, (prompts,) * count))

    def _recorded(self, drafts: DraftSync) -> DraftSync:
        """Return the drafts of a step, some replicas of which may replay a recording.

        A recording of a step with prompts has the most drafts. Every recording has passes, which a replica cannot leave
        out if no other one decodes.
        """
        limits = self._limits
        if not limits.graph_sizes and not limits.graph_tokens:
            return drafts
        lengths = [query - 1 for query in limits.queries]
        mixed = any(drafts.prompts) and limits.graph_tokens
        most = lengths[-1] if mixed else next(length for length in lengths if length >= drafts.most)
        return structs.replace(drafts, most=most, decodes=(1,) * self._exchanges.replicas)

    def _of_recording(self, shape: StepShape) -> StepPasses:
        """Return the passes of a recording: all replicas have the same, with as many rows as its bound, or as it."""
        count, prompts = self._exchanges.replicas, not shape.decode
        drafts = DraftSync(shape.query - 1, (max(1, shape.seqs),) * count, (prompts,) * count)
        seqs = shape.bound // shape.query if self._exchanges.even else 0
        room = max(shape.bound, seqs * self._width)
        return StepPasses(drafts, (shape.tokens,) * count, room, seqs, shape.bound > 0, prompts)

"""The agreement of replicas in lock-step: how many tokens each of them computes in a step."""

from dataclasses import replace

from quire.contracts.step import StepPlan
from quire.kernels.step import NUM_TOKENS, StepWords
from quire.kernels.step.state import Limits
from quire.layers.context import ReplicaTokens, StepContext
from quire.layers.stack import Model, join_layers
from quire.spec.joint_passes import JointPasses
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
        self.parts = () if passes is None else (passes,)
        count = words.words[NUM_TOKENS : NUM_TOKENS + 1]
        self._tokens = ReplicaTokens((0,) * limits.replicas, count, max(limits.bounds, default=0))

    def before(self, plan: StepPlan) -> None:
        """Take the tokens of each replica from the plan. A plan without them is the same on all replicas."""
        own = (self._words.num_tokens,) * self._limits.replicas
        rows, bounds = own if plan.sync is None else plan.sync.rows, self._limits.bounds
        bound = next((bound for bound in bounds if bound >= max(rows)), max(bounds, default=0))
        self._tokens = replace(self._tokens, rows=rows, bound=bound)
        if self._passes is not None:
            self._passes.take(None if plan.sync is None else plan.sync.drafts, rows)

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the shape with the bound of the step's only exchange per layer.

        0: exact numbers are exchanged, or a layer exchanges several times.
        """
        tokens = self._tokens
        return replace(shape, bound=0 if max(tokens.rows) > tokens.bound else tokens.bound)

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context with the tokens of all replicas."""
        return replace(ctx, replicas=self._of(shape))

    def join(self, shape: StepShape, layers: Layers) -> None:
        """Launch the exchanges of layers with experts, for the tokens of other replicas."""
        if self._model.vocabulary is not None:
            self._model.vocabulary.group.begin_step()
        if self._passes is not None and not self._late:
            self._passes.join_drafts()
        join_layers(self._model, self._of(shape), layers)
        if self._passes is not None:
            self._passes.join_prompts()

    def _of(self, shape: StepShape) -> ReplicaTokens:
        """Return the tokens of the replicas; a recording knows their bound alone."""
        if not shape.recorded:
            return self._tokens
        rows = () if shape.bound else (shape.tokens,) * self._limits.replicas  # exact ones only in a rehearsal
        return replace(self._tokens, rows=rows, bound=shape.bound)

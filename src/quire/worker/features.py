"""The interface of step features: everything that happens in a step beside inputs, layers, head and sampling.

The runner calls the hooks of `StepFeature` and names no feature. A hook that no feature has costs nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.lora import AdapterRows
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.kernels.step.upload import Change
from quire.layers.context import StepContext
from quire.worker.recorder import StepShape

Found = dict[str, dict[int, Any]]  # field of `StepResult` -> slot -> value
Results = Callable[[], Found]  # returns the results of a step; called after the device has finished the step
Layers = Sequence[int]  # indices of the layers that run: all but in a rehearsal


class LateWork(Protocol):
    """Work that small steps of decodes put off to a later step.

    most   most sequences of such a step, for which `catch_up` is recorded
    """

    most: int

    def overdue(self, plan: StepPlan, shape: StepShape) -> list[tuple[int, int]]:
        """Return (begin, number) of the sequences that need a `catch_up` before the step. Asked once a step."""

    def catch_up(self, step: StepWords, tables: Tables, begin: int, seqs: int) -> None:
        """Launch the work for `seqs` sequences of the step from `begin` on. Recorded where `begin` is 0."""


class StepFeature:
    """A feature of a step. Its hooks stand here in the order in which a step calls them.

    A feature overrides the hooks that it needs. The others are never called. Hooks marked "recorded" launch work that
    recorders record and replay: they read no value of a plan, and get the sizes of the step.

    late       work that small steps put off; None: there is none
    head       returns the adapters of the rows of the head, or None if no row has one; recorded for a step of decodes
    parts      objects whose calls belong to the feature; a trace shows them, too
    controls   operation by name -> function that does it, between two steps; see `Executor.control`
    """

    late: LateWork | None = None
    head: Callable[[StepShape], AdapterRows | None] | None = None
    parts: tuple[object, ...] = ()
    controls: Mapping[str, Callable[..., object]] = {}

    def apply(self, plan: StepPlan) -> list[Change]:
        """Return the table changes of the feature for a plan. The runner has changed no table for the plan yet.

        A feature forgets the requests that the plan releases, and remembers those that it admits.
        """
        return []

    def before(self, plan: StepPlan) -> None:
        """Do what comes before the launches of the step. The plan and the table changes were sent to the device."""

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the exact shape of the step with the feature's part in it, before it is padded to a recording."""
        return shape

    def inputs(self, step: StepWords, tables: Tables, shape: StepShape) -> None:
        """Launch work whose result the inputs of the step need. Recorded."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input [T, hidden] of the layers, in place of the model's embedding. Recorded."""
        raise NotImplementedError

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context of the layers with the feature's part in it. Recorded."""
        return ctx

    def run_layers(self, plan: StepPlan, hidden: Tensor, ctx: StepContext, layers: Layers) -> Tensor | None:
        """Run the layers of an eager step: hidden [T, hidden] -> [T, hidden]. None: others run them."""
        return None

    def layers_done(
        self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, shape: StepShape
    ) -> None:
        """Launch work on the output of the layers, hidden [T, hidden], before the final norm. Recorded."""

    def computed(self, plan: StepPlan, hidden: Tensor) -> Results | None:
        """Launch work on the hidden states of a step with prompts. Return a function that gives results, or None.

        hidden   [>= T, hidden] output of the layers, before the final norm; the next step overwrites it
        """
        return None

    def logits(self, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        """Read the logits [R, V] of the sampled rows, with the slot [R] and position [R] of each."""

    def sampled(self, step: StepWords, tables: Tables, buffers: StepBuffers, tokens: Tensor, rows: int) -> None:
        """Launch work on the sampled tokens [>= rows] before they are written to the token history. Recorded."""

    def after(self, plan: StepPlan, rows: I32, buffers: StepBuffers, out: Tensor) -> None:
        """Do what comes after the launches of the step.

        rows   [R] slot of each sampled row; `out` [3, >= R]: tokens, error codes and drafts of these rows
        """

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the fields of the `StepResult` that the feature knows. The device has finished the step.

        counts   [N] sampled rows of each slot; None: one each
        words    [3, >= R] tokens, error codes and drafts of the sampled rows
        """
        return {}

    def join(self, shape: StepShape, layers: Layers) -> None:
        """Launch this rank's part in a step in which other replicas have tokens and this one has none. Recorded."""

    def settle(self) -> None:
        """End what this rank owes to other ranks, before another runner uses the same groups of ranks."""


HOOKS = tuple(name for name, value in vars(StepFeature).items() if callable(value) and not name.startswith("_"))
Hooked = tuple[StepFeature, ...]


class Features:
    """The step features of a runner, in the order in which they are called. `features.apply`: those with `apply`."""

    apply: Hooked
    before: Hooked
    fit: Hooked
    inputs: Hooked
    embed: Hooked
    context: Hooked
    run_layers: Hooked
    layers_done: Hooked
    computed: Hooked
    logits: Hooked
    sampled: Hooked
    after: Hooked
    results: Hooked
    join: Hooked
    settle: Hooked

    def __init__(self, features: Iterable[StepFeature] = ()) -> None:
        self.all: Hooked = ()
        self._set(tuple(features))

    def attach(self, feature: StepFeature) -> None:
        """Add a feature behind the others, between two steps."""
        self._set((*self.all, feature))

    def detach(self, feature: StepFeature) -> None:
        """Remove a feature, between two steps."""
        self._set(tuple(one for one in self.all if one is not feature))

    @property
    def controls(self) -> dict[str, Callable[..., object]]:
        """Operation by name -> function, of all features."""
        return {name: control for feature in self.all for name, control in feature.controls.items()}

    def _set(self, features: Hooked) -> None:
        self.all = features
        self.late = tuple(feature.late for feature in features if feature.late is not None)
        self.heads = tuple(feature.head for feature in features if feature.head is not None)
        for name in HOOKS:
            has = (one for one in features if getattr(type(one), name) is not getattr(StepFeature, name))
            setattr(self, name, tuple(has))

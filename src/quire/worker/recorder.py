"""The recorder interface: record the launches of a step once and replay them. The base class runs every step eagerly.

`Graphs` captures whole steps of padded sizes as CUDA graphs, ahead of time. `LayerRecordings` records layers of small
steps on a CPU, at their first use. Other steps run eagerly; `unrecorded` lists them with reasons.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from quire.layers.context import StepContext
from quire.layers.stack import Model, run_layers

Key = tuple[str, int, int]  # kind ("decode", "mixed", "join", "sample", "late"), size, variant
MOST_SEQS = 1 << 20  # more than the sequences of any step


@dataclass(frozen=True)
class StepShape:
    """Sizes and features of a step, which determine its kernel launches.

    tokens     tokens of the step, or an upper bound
    seqs       sequences of the step, or an upper bound
    rows       sampled rows of the step, or an upper bound
    decode     True: every sequence is a decode, and every token is a sampled row
    query      most tokens of a decode: 1, or 1 + its drafts; an upper bound, too
    shared     True: decodes share a prefix, and attention reads it only once
    recorded   True: the sizes are those of a recording (such as a CUDA graph), kept by the recorder under `key`
    bound      upper bound of the tokens of each replica in lock-step; 0: without others, or if exact numbers are used
    eager      True: a feature runs the layers of the step itself, so no recording fits
    adapted    True: some rows have an adapter
    context    upper bound of the tokens of a sequence, of a decode step; 0: that of the engine
    most       `StepSync.decode`, if all replicas run one size (`GraphPlan.even`); (0, 0): each runs its own
    """

    tokens: int
    seqs: int
    rows: int
    decode: bool
    shared: bool = False
    recorded: bool = False
    bound: int = 0
    query: int = 1
    eager: bool = False
    adapted: bool = False
    context: int = 0
    most: tuple[int, int] = (0, 0)

    @property
    def key(self) -> Key:
        """Key of the recording for this shape. It has the layers and, for a decode shape, also the logits.

        Without tokens it has this rank's part in the exchanges of other replicas, whose decodes have at most `query`
        tokens if a drafter takes part in them.
        """
        if not self.tokens:
            return "join", self.bound, self.query - 1
        more = " with adapters" * self.adapted
        if self.decode:
            more += " of short contexts" * bool(self.context)
            return f"decode{more}", self.tokens, 2 * (self.bound * MOST_SEQS + self.query - 1) + self.shared
        return f"mixed{more}", self.tokens, 2 * (self.bound * MOST_SEQS + self.seqs) + self.shared


class Recorder:
    """A recorder that runs every step eagerly, and the base class of the recorders that record and replay steps.

    why      the reason why nothing is recorded
    counts   how often launches were "recorded", "replayed", and "run" eagerly
    static   True: logits are written to one buffer of the largest size, which keeps its address
    """

    static = False

    def __init__(self, why: str) -> None:
        self.why = why
        self.counts: Counter[str] = Counter()

    def fit(self, shape: StepShape) -> StepShape:
        """Return the shape that a step runs with: `shape`, padded to the sizes of a recording if one fits."""
        return shape

    def shapes(self) -> list[StepShape]:
        """Return the shapes to capture ahead of time, largest first: steps with prompts, then decodes.

        Decodes come in pairs, without and with a shared prefix. Steps with prompts have `rows` 0.
        """
        return []

    def run(self, key: Key, work: Callable[[], None]) -> None:
        """Replay the recording under `key`; without a recording, run `work` eagerly."""
        work()

    def capture(self, key: Key, work: Callable[[], None]) -> None:
        """Record the launches of `work` under `key`; the base class does nothing.

        The caller has run `work` before (`StepRunner.rehearse`), and records larger work first.
        """

    def run_layers(self, model: Model, hidden: Tensor, ctx: StepContext, layers: Iterable[int] | None = None) -> Tensor:
        """Run `layers` (None: all): hidden [T, hidden] -> [T, hidden]. The result is valid until the next step."""
        return run_layers(model, hidden, ctx, layers)

    def unrecorded(self) -> dict[str, str]:
        """Return a dict for display: kind of steps that are not recorded -> the reason."""
        return {"every step": self.why}

    def __len__(self) -> int:
        """Number of recordings."""
        return 0

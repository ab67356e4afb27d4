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

Key = tuple[str, int, int]  # kind ("decode", "mixed", "sample"), size, variant


@dataclass(frozen=True)
class StepShape:
    """Sizes and features of a step: its launches depend on nothing else.

    tokens     tokens of the step, or an upper bound
    seqs       sequences of the step, or an upper bound
    rows       sampled rows of the step, or an upper bound
    decode     every sequence is a decode of one token, which is sampled
    shared     decodes read a common prefix once
    recorded   the sizes are padded to those of a recording under `key`
    """

    tokens: int
    seqs: int
    rows: int
    decode: bool
    shared: bool = False
    recorded: bool = False

    @property
    def key(self) -> Key:
        """The key of the recording of this shape: of the layers, and for decodes of the logits, too."""
        if self.decode:
            return "decode", self.tokens, int(self.shared)
        return "mixed", self.tokens, 2 * self.seqs + self.shared


class Recorder:
    """A recorder that records nothing, and the base of those that do.

    why      the reason why nothing is recorded
    counts   recordings "replayed", made ("recorded"), and work that was "run" eagerly
    static   logits go to one static buffer of the largest size
    """

    static = False

    def __init__(self, why: str) -> None:
        self.why = why
        self.counts: Counter[str] = Counter()

    def fit(self, shape: StepShape) -> StepShape:
        """Return the shape that a step runs with: padded to a recording's sizes where there is one."""
        return shape

    def shapes(self) -> list[StepShape]:
        """Return the shapes to capture ahead of time, largest first: steps with prompts, then decodes.

        Decodes come in pairs, without and with a shared prefix. Steps with prompts have `rows` 0.
        """
        return []

    def run(self, key: Key, work: Callable[[], None]) -> None:
        """Replay the recording under `key`, or run `work` eagerly."""
        work()

    def capture(self, key: Key, work: Callable[[], None]) -> None:
        """Record `work` under `key`. A rehearsal has run `work` before; larger work is recorded first."""

    def run_layers(self, model: Model, hidden: Tensor, ctx: StepContext, layers: Iterable[int] | None = None) -> Tensor:
        """Run the layers: hidden [T, hidden] -> [T, hidden], valid until the next step. See `quire.layers.stack`."""
        return run_layers(model, hidden, ctx, layers)

    def unrecorded(self) -> dict[str, str]:
        """Return kinds of steps that are not recorded -> the reason, for display."""
        return {"every step": self.why}

    def __len__(self) -> int:
        """Number of recordings."""
        return 0

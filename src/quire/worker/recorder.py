"""How the launches of a step are recorded and replayed: here not at all, and steps have the sizes that they have.

`Graphs` records whole steps of padded sizes ahead of time on a GPU, `LayerTapes` the layers of small steps on a CPU at
their first use. What they cannot record runs as it comes; `unrecorded` names it, with the reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from quire.layers.context import StepContext
from quire.layers.stack import Model, run_layers

Key = tuple[str, int, int]  # what it is, of what size, and the variant


@dataclass(frozen=True)
class StepShape:
    """Sizes that the launches of a step depend on, and its features.

    tokens, seqs, rows   of the step, or upper bounds of them; `rows` are sampled
    decode     every sequence has one token, which is sampled, and nothing else is asked for
    shared     decodes read a common prefix once
    recorded   the sizes are those of a recording, under `key`
    """

    tokens: int
    seqs: int
    rows: int
    decode: bool
    shared: bool = False
    recorded: bool = False

    @property
    def key(self) -> Key:
        """Names the launches of its layers, and of a decode's logits."""
        if self.decode:
            return "decode", self.tokens, int(self.shared)
        return "mixed", self.tokens, 2 * self.seqs + self.shared


class Recorder:
    """Records nothing, for a reason (`why`). `counts`: how often what was replayed, recorded, run as it came.

    static   results of a step lie where its recording leaves them, so that buffers for the largest are there
    """

    static = False

    def __init__(self, why: str) -> None:
        self.why = why
        self.counts: Counter[str] = Counter()

    def fit(self, shape: StepShape) -> StepShape:
        """The sizes that a step runs with."""
        return shape

    def shapes(self) -> list[StepShape]:
        """Of what is to be captured ahead: steps with prompts, then decodes in pairs (without and with a shared
        prefix), each largest first. Of steps with prompts `rows` do not count."""
        return []

    def run(self, key: Key, work: Callable[[], None]) -> None:
        """Replay what was recorded under `key`, or do `work`."""
        work()

    def capture(self, key: Key, work: Callable[[], None]) -> None:
        """Record `work`, which a rehearsal has done before; larger work first."""

    def run_layers(self, model: Model, hidden: Tensor, ctx: StepContext, layers: Iterable[int] | None = None) -> Tensor:
        """hidden [T, hidden] -> [T, hidden], to be read before the next step; see `quire.layers.stack`."""
        return run_layers(model, hidden, ctx, layers)

    def unrecorded(self) -> dict[str, str]:
        """Which steps are not recorded, in words, and why."""
        return {"every step": self.why}

    def __len__(self) -> int:
        """Recordings that there are."""
        return 0

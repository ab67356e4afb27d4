"""The tokens to which a layer with an indexer attends in the passes of a step: the first pass chooses them for all.

    first pass     rows  t5 t6     each chooses tokens; the choice of the last row, t6, is kept
    later passes   row   d7        attends to the choice of t6; its key is written to the cache
                   row   d8        the same

The layers of other families choose tokens anew in each pass, and so do these with `index_share_for_mtp_iteration`
false.
"""

from dataclasses import replace
from types import ModuleType

from torch import Tensor

from quire.layers.context import StepContext


class StepChoice:
    """The choice of a step. A drafter makes one for each step, and runs all passes of the step with it.

    kernel   an implementation of `quire.kernels.index`
    group    KV group of the layer
    """

    def __init__(self, kernel: ModuleType, group: int) -> None:
        self._kernel, self._group = kernel, group
        self._kept: Tensor | None = None  # [S, top_k], of the sequences of the step

    def before(self, ctx: StepContext) -> StepContext:
        """Return the context with which a pass runs: of a later pass with the choice of the first."""
        if self._kept is None:
            return ctx
        return replace(ctx, chosen=self._kernel.reuse(self._kept, ctx.attention[self._group]), reuses=True)

    def after(self, ctx: StepContext) -> None:
        """Keep the choice of the first pass, which ran with this context."""
        if self._kept is None:
            assert ctx.chosen is not None, "the layer has an indexer"
            self._kept = self._kernel.keep_last(ctx.chosen, ctx.attention[self._group])

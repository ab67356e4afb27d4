"""The choice of a drafter, from the plan of speculation."""

import importlib
from types import ModuleType

from quire.contracts.speculation import Speculation
from quire.kernels.attention import KVView
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.step import Tables
from quire.layers.stack import Model
from quire.spec.drafter import Drafter
from quire.spec.ngram import NgramDrafter

LATE = 8  # decodes of a step: with more, one of them completes a block in most steps, and a pass has much padding


def make_drafter(
    speculation: Speculation | None,
    implementation: str,
    *,
    model: Model,
    kv: list[KVView],
    operations: ModuleType,
    tables: Tables,
    sampling: tuple[SamplerOperations, Rows],
    windows: tuple[int | None, ...] | None = None,
) -> Drafter | None:
    """Return the drafter of an engine; None without speculation.

    implementation   "ref" or "triton", as of the step operations, `operations`
    model, kv        the model, and the KV caches of its layers, then of its prediction layer, draft model or EAGLE head
    sampling         sampler operations, and the parameters of all slots
    windows          sliding window of each KV group, if the drafter may put entries off; None: it may not
    """
    if speculation is None:
        return None
    if speculation.layered:
        from quire.spec.draft_passes import HeadPass, ModelPass, Pass, PredictionPass
        from quire.spec.layers import LayerDrafter

        own, draft = kv[len(model.layers) :], model.draft
        passes: Pass
        if draft is None:
            passes = PredictionPass(model, own)
        else:
            passes = (HeadPass if speculation.head else ModelPass)(model, draft, own)
        return LayerDrafter(
            passes,
            model.dtype,
            operations,
            tables,
            sampling=sampling,
            most=speculation.num_drafts,
            exact=implementation == "ref",
            # The blocks behind a window are gone when a catch-up pass would read them.
            late=LATE if windows is not None and all(windows[group] is None for group in passes.groups) else 0,
        )
    ngram = importlib.import_module(f"quire.kernels.ngram.{implementation}")
    return NgramDrafter(ngram, speculation.shortest, speculation.longest)

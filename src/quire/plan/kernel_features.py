"""Features that kernels must have for an engine, as far as the table of what works with what lets it run. No torch."""

from quire.args.checkpoint import ModelArgs
from quire.kernels.supports import FIXED_ORDER
from quire.plan.kinds.blocks import score_features
from quire.plan.meeting_rows.records import MISSING, Inputs
from quire.plan.meetings import rows_of


def attention_features(inputs: Inputs, args: ModelArgs) -> frozenset[str]:
    """Return the features that attention kernels must have, without those that are not implemented for this engine.

    With FIXED_ORDER, the kernels of all other operations must have it, too.
    """
    wanted = {
        "CacheBlend": ("rows", inputs.config.cache.enable_cache_blend),
        "batch invariance": (FIXED_ORDER, inputs.config.device.batch_invariant),
    }
    lacking = {name for row in rows_of(inputs) if row.status == MISSING for name in (row.feature, row.other)}
    return score_features(args) | {word for name, (word, on) in wanted.items() if on and name not in lacking}

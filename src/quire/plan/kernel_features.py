"""Features that kernels must have for an engine, as far as the table of what works with what lets it run. No torch."""

from quire.args.checkpoint import ModelArgs
from quire.plan.kinds.blocks import score_features
from quire.plan.meeting_rows.records import MISSING, Inputs
from quire.plan.meetings import rows_of


def attention_features(inputs: Inputs, args: ModelArgs) -> frozenset[str]:
    """Return the features that attention kernels must have, without those that are not implemented for this engine."""
    asked = score_features(args) | frozenset(["rows"] * inputs.config.cache.enable_cache_blend)
    blend = any(row.status == MISSING and "CacheBlend" in (row.feature, row.other) for row in rows_of(inputs))
    return asked - frozenset(["rows"] * blend)

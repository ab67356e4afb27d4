"""Features that kernels must have for an engine, as far as the table of what works with what lets it run. No torch."""

from quire.args.checkpoint import ModelArgs
from quire.kernels.latent_rows import FEATURE as ROWS
from quire.plan.kinds.blocks import score_features
from quire.plan.meeting_rows.records import MISSING, Inputs
from quire.plan.meetings import rows_of


def attention_features(inputs: Inputs, args: ModelArgs) -> frozenset[str]:
    """Return the features that attention kernels must have, without those that are not implemented for this engine."""
    asked = score_features(args) | frozenset(["rows"] * inputs.config.cache.enable_cache_blend)
    return asked - missing_features(inputs)


def missing_features(inputs: Inputs) -> frozenset[str]:
    """Return features of kernels that an engine would need, and that rows of the table say are not implemented."""
    rows = [{row.feature, row.other} for row in rows_of(inputs) if row.status == MISSING]
    lacking = [ROWS] * ({"a GPU", "rows of latents"} in rows)
    return frozenset([*lacking, *("rows" for row in rows if "CacheBlend" in row)])

"""OLMo-Hybrid (Ai2): gated delta nets with norms before each half, and layers as those of OLMo-3 without windows."""

from quire.models.names import BLOCK_NORMS, DELTA_RULE, NameMap, renamed
from quire.models.olmo2 import NAME_MAP as OLMO2

_AT = "model.layers.{i}.linear_attn."

NAME_MAP: NameMap = (
    *OLMO2,
    *BLOCK_NORMS,
    *renamed(_AT, DELTA_RULE),
    (f"{_AT}g_proj.weight", "layers.{i}.delta.input.weight", "z"),
    (f"{_AT}a_proj.weight", "layers.{i}.delta.rates.weight", "a"),
)

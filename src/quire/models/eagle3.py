"""EAGLE-3 heads: a Llama layer that reads embeddings and states beside each other; norm, head, and a map of ids."""

from quire.models import eagle
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *eagle.NAME_MAP,
    ("{at}.input_layernorm.weight", "layers.{i}.token_norm.weight", ""),
    ("{at}.hidden_norm.weight", "layers.{i}.state_norm.weight", ""),
    ("norm.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
    ("d2t", "ids.offsets", ""),
)

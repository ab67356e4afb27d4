"""EAGLE-3 heads: a Llama layer that reads embeddings and states beside each other; norm, head, and a map of ids."""

from quire.contracts.params import MOST_READS
from quire.models import eagle
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *eagle.NAME_MAP,
    ("{at}.input_layernorm.weight", "layers.{i}.token_norm.weight", ""),
    ("{at}.hidden_norm.weight", "layers.{i}.state_norm.weight", ""),
    ("input_norm.weight", "layers.{i}.read_norm.weight", ""),
    *((f"fc_norm.{read}.weight", "layers.{i}.read_norm.weight", str(read)) for read in range(MOST_READS)),
    ("norm.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
    ("d2t", "ids.offsets", ""),
)

"""MiniMax-M2: one RMS norm over all heads of queries and one over those of keys, experts as Mixtral names them."""

from quire.models import names
from quire.models.names import NameMap

_AT = "model.layers.{i}.block_sparse_moe."

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.WIDE_NORM,
    *names.MIXTRAL_EXPERTS,
    (f"{_AT}e_score_correction_bias", "layers.{i}.mlp.router.correction", ""),
)

"""EAGLE heads: a Llama layer without a norm before attention, behind a projection. It has no norm and no head."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    ("{fc}.weight", "layers.{i}.join.weight", ""),
    ("{fc}.bias", "layers.{i}.join.bias", ""),
    *names.renamed(
        "{at}.", names.BLOCK_NORMS, names.ATTENTION, names.QKV_BIAS, names.OUTPUT_BIAS, names.GATED_MLP, names.MLP_BIAS
    ),
)

"""Mixtral (Mistral AI): experts in every feed-forward layer, under names of their own."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    ("model.layers.{i}.block_sparse_moe.gate.weight", "layers.{i}.mlp.router.weight", ""),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "layers.{i}.mlp.experts.down", "{e}."),
)

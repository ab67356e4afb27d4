"""Choose the kernel of a step's decodes, from the projection on."""

import importlib
from types import ModuleType

from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.joined.choice import JoinedDecodes
from quire.kernels.joined.inputs import LatentInputs
from quire.kernels.latent import LatentView


def joined_kernel(decodes: JoinedDecodes, qkv: Tensor, kv: KVView, meta: AttentionMeta) -> ModuleType | None:
    """Return the module in `kernels/joined` that takes a step of the projection qkv [T, Hq + 2 Hkv, D]; None: none.

    decodes   what the plan has chosen for the layer
    """
    names = ["decode_clusters"] if _for_clusters(decodes, meta) else []
    names += ["decode_attention"] if qkv.shape[0] in decodes.rows else []
    modules = (importlib.import_module(f"quire.kernels.joined.{name}") for name in names)
    return next((module for module in modules if module.fits(qkv, kv, meta)), None)


def latent_kernel(
    decodes: JoinedDecodes, inputs: LatentInputs, norm: Tensor, kv: LatentView, meta: AttentionMeta
) -> ModuleType | None:
    """Return the module that takes a step of a layer with latent attention; None: none.

    norm   weight of the latents' norm
    """
    if not _for_clusters(decodes, meta):
        return None
    module = importlib.import_module("quire.kernels.joined.latent_clusters")
    return module if module.fits(inputs, norm, kv, meta) else None


def _for_clusters(decodes: JoinedDecodes, meta: AttentionMeta) -> bool:
    """Return True if a step has no more sequences, and no longer ones, than the plan has for clusters of blocks."""
    short = not decodes.context or 0 < (meta.most_context or 0) <= decodes.context
    return short and 0 < len(meta.seq_lens) <= decodes.sequences

"""The kinds of layers, one object for each: parameters, KV cache, division among ranks, kernels, calls, facts.

    mixers          grouped.py (grouped-query attention) latent.py (multi-head latent attention)
    feed-forward    dense.py (gated MLP) experts.py (mixture of experts)
    layers          blocks.py (of a decoder, MTP layers, EAGLE heads)

`mixer` and `feed_forward` are the only places that ask the arguments of a model for the kind of a layer.
"""

from quire.args.checkpoint import ModelArgs
from quire.plan.kinds.dense import DenseKind
from quire.plan.kinds.experts import ExpertsKind
from quire.plan.kinds.grouped import GroupedKind
from quire.plan.kinds.interfaces import FeedForward, Mixer
from quire.plan.kinds.latent import LatentKind


def mixer(args: ModelArgs) -> Mixer:
    """Return the kind of the mixers of a model's layers."""
    return GroupedKind(args) if args.latent is None else LatentKind(args, args.latent)


def feed_forward(args: ModelArgs, layer: int) -> FeedForward:
    """Return the kind of the feed-forward part of a layer. A draft layer is as the last layers are."""
    if args.moe is not None and args.has_experts(layer):
        return ExpertsKind(args, args.moe)
    return DenseKind("mlp.", args.intermediate_size, args.mlp_bias)

"""The kinds of layers, one object for each: parameters, KV cache, division among ranks, kernels, calls, facts.

    mixers          grouped.py (grouped-query attention) latent.py (multi-head latent attention) delta.py (recurrent
                    layers with the gated delta rule) shortconv.py (with a short convolution)
                    mamba.py (with Mamba 2) foreign.py (a whole layer of transformers)
    feed-forward    dense.py (gated MLP) experts.py (mixture of experts) beside.py (both beside each other)
    neither         nothing.py (the half that a layer does not have)
    layers          blocks.py (of a decoder, MTP layers, EAGLE heads)

`MIXERS` and `FEED_FORWARDS` are the only places of the plan that ask for the kind of a layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.args.delta import DeltaArgs
from quire.args.experts import MoEArgs
from quire.args.latent import LatentArgs
from quire.args.layers import (
    BesideArgs,
    DenseArgs,
    FeedForwardArgs,
    ForeignArgs,
    ForeignExpertsArgs,
    GroupedArgs,
    MixerArgs,
    NoneArgs,
)
from quire.args.mamba import MambaArgs
from quire.args.shortconv import ShortConvArgs
from quire.plan.kinds.beside import BesideKind
from quire.plan.kinds.delta import DeltaKind
from quire.plan.kinds.dense import DenseKind
from quire.plan.kinds.experts import ExpertsKind
from quire.plan.kinds.foreign import ForeignExpertsKind, ForeignKind
from quire.plan.kinds.grouped import GroupedKind
from quire.plan.kinds.interfaces import FeedForward, Mixer
from quire.plan.kinds.latent import LatentKind
from quire.plan.kinds.mamba import MambaKind
from quire.plan.kinds.nothing import NoneKind
from quire.plan.kinds.shortconv import ShortConvKind

MIXERS: Mapping[type[MixerArgs], Callable[[Any], Mixer]] = {
    GroupedArgs: GroupedKind,
    LatentArgs: LatentKind,
    DeltaArgs: DeltaKind,
    ShortConvArgs: ShortConvKind,
    MambaArgs: MambaKind,
    ForeignArgs: ForeignKind,
    NoneArgs: NoneKind,
}
FEED_FORWARDS: Mapping[type[FeedForwardArgs], Callable[[Any], FeedForward]] = {
    DenseArgs: DenseKind,
    MoEArgs: ExpertsKind,
    ForeignExpertsArgs: ForeignExpertsKind,
    BesideArgs: BesideKind,
    NoneArgs: NoneKind,
}


def mixer(args: MixerArgs) -> Mixer:
    """Return the kind of a layer's mixer."""
    return MIXERS[type(args)](args)


def feed_forward(args: FeedForwardArgs) -> FeedForward:
    """Return the kind of a layer's feed-forward part."""
    return FEED_FORWARDS[type(args)](args)


def mixers(args: ModelArgs) -> tuple[Mixer, ...]:
    """Return the kinds of the mixers of a model, each kind and size once, in the order of the layers."""
    return tuple(map(mixer, args.mixers))


def attending(args: ModelArgs) -> tuple[Mixer, ...]:
    """Return the kinds of `mixers` that attend to tokens, and keep keys and values of them."""
    return tuple(map(mixer, args.attending))

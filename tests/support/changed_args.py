"""A model's arguments with another mixer, other experts or fewer layers."""

from dataclasses import replace
from typing import Any

from msgspec import structs

from quire.args.checkpoint import ModelArgs
from quire.args.latent import LatentArgs
from quire.args.layers import AttentionArgs, DenseArgs, LayerArgs
from quire.args.prediction import PredictionArgs


def with_mixer(args: ModelArgs, **changes: Any) -> ModelArgs:
    """Change the mixers of all layers that attend."""

    def changed(one: LayerArgs) -> LayerArgs:
        attends = isinstance(one.mixer, AttentionArgs)
        return structs.replace(one, mixer=structs.replace(one.mixer, **changes)) if attends else one

    return replace(args, layers=tuple(map(changed, args.layers)))


def with_experts(args: ModelArgs, **changes: Any) -> ModelArgs:
    """Change the experts of all layers that have experts."""

    def changed(one: LayerArgs) -> LayerArgs:
        return one if one.experts is None else one.with_experts(structs.replace(one.experts, **changes))

    return replace(args, layers=tuple(map(changed, args.layers)))


def without_experts(args: ModelArgs) -> ModelArgs:
    """Give all layers a dense feed-forward part."""
    return replace(args, layers=tuple(structs.replace(one, feed_forward=DenseArgs(width=64)) for one in args.layers))


def with_layers(args: ModelArgs, count: int) -> ModelArgs:
    """Repeat or drop layers, so that there are `count`, and none that predicts several tokens."""
    own = args.layers[: args.num_layers]
    return replace(args, layers=tuple(own[i % len(own)] for i in range(count)), prediction=PredictionArgs())


def latent_of(args: ModelArgs) -> LatentArgs:
    """The latent attention of a model whose layers all have the same."""
    (mixer,) = args.mixers
    assert isinstance(mixer, LatentArgs)
    return mixer

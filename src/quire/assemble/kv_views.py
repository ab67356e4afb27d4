"""Views of a KV cache: the tensors of each layer."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from quire.args.layers import NONE, LayerArgs, MixerArgs, RecurrentArgs

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.attention import KVView
    from quire.kernels.states import BothViews, StateView
    from quire.layers.stack import Model


def kv_views(
    mixers: Iterable[MixerArgs],
    components: "Iterable[tuple[Tensor, ...]]",
    scales: Sequence[tuple[float, float]] = (),
) -> "list[KVView | StateView | BothViews]":
    """Return the `KVView` of each layer (`LatentView` for latent attention), those of draft layers last.

    components   per layer, the tensors of its KV cache: keys and values, or latent and rotated key. Of a recurrent
                 layer those of its states, which a `StateView` has
    scales       per layer, of keys and values in an 8-bit cache; (): all are 1
    """
    from quire.kernels.attention import KVView
    from quire.kernels.latent import LatentView
    from quire.kernels.states import NOTHING, StateView

    every = chain(scales, repeat((1.0, 1.0)))  # draft layers have none
    return [
        NOTHING
        if mixer == NONE
        else StateView(*parts)
        if isinstance(mixer, RecurrentArgs)
        else LatentView(*parts, own[0])
        if mixer.one_scale
        else KVView(*parts, *own)
        for mixer, parts, own in zip(mixers, components, every, strict=False)
    ]


def model_views(
    model: "Model",
    blocks: "Callable[[int], tuple[Tensor, ...]]",
    scales: Sequence[tuple[float, float]] = (),
    states: "Callable[[int], tuple[Tensor, ...]]" = lambda layer: (),
) -> "list[KVView | StateView | BothViews]":
    """Return the KV caches of a model's layers, then of its prediction layer or draft model.

    blocks, states   return the tensors of a layer, as `KVArena.views` and `StateArena.views`
    """

    from quire.kernels.attention import KVView
    from quire.kernels.states import BothViews, StateView

    def views(layer: int, own: LayerArgs) -> "tuple[Tensor, ...]":
        if own.beside is not None:
            return blocks(layer)
        return states(layer) or (() if own.mixer == NONE else blocks(layer))

    mixers = [one.mixer for one in model.held]
    found = kv_views(mixers, (views(model.args.kept_by(i), one) for i, one in enumerate(model.held)), scales)
    for layer, one in enumerate(model.held):
        kv = found[layer]
        if one.beside is not None and isinstance(kv, KVView):
            found[layer] = BothViews(kv, StateView(*states(layer)))
    if model.draft is not None:
        held, first = model.draft, len(found)
        mixers = [one.mixer for one in held.held]
        found += kv_views(mixers, (views(first + held.args.kept_by(i), one) for i, one in enumerate(held.held)))
    return found

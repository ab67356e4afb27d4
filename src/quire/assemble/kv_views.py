"""Views of a KV cache: the tensors of each layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from quire.args.latent import LatentArgs
from quire.args.layers import NONE, LayerArgs, MixerArgs

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.attention import KVView
    from quire.kernels.latent import LatentView
    from quire.kernels.states import BothViews, StateView
    from quire.layers.stack import Model


def kv_views(
    mixers: Iterable[MixerArgs],
    components: "Iterable[tuple[Tensor, ...] | StateView]",
    scales: Sequence[tuple[float, float]] = (),
) -> "list[KVView | StateView | BothViews]":
    """Return the `KVView` of each layer (`LatentView` for latent attention), those of draft layers last.

    components   per layer, the tensors of its KV cache: keys and values, or latent and rotated key, and behind these
                 the keys of an indexer; or rows of both. Of a recurrent layer its states
    scales       per layer, of keys and values in an 8-bit cache; (): all are 1
    """
    from quire.kernels.attention import KVView
    from quire.kernels.states import NOTHING, StateView

    every = chain(scales, repeat((1.0, 1.0)))  # draft layers have none
    return [
        NOTHING
        if mixer == NONE
        else parts
        if isinstance(parts, StateView)
        else latent_view(mixer, parts, own[0])
        if isinstance(mixer, LatentArgs)
        else KVView(*parts, *own)
        for mixer, parts, own in zip(mixers, components, every, strict=False)
    ]


def latent_view(mixer: LatentArgs, parts: "tuple[Tensor, ...]", scale: float) -> "LatentView":
    """Return the cache of a layer with latent attention: parts and scale as of `kv_views`."""
    from quire.kernels.index import IndexView
    from quire.kernels.latent import LatentView
    from quire.kernels.latent.rows import row_view

    rows = parts[0].dtype.itemsize == 1 and not parts[0].is_floating_point()
    rest = parts[1:] if rows else parts[2:]
    index = IndexView(*rest) if rest else None
    if rows:
        return row_view(parts[0], mixer.kv_rank, mixer.rope_dim, index=index)
    return LatentView(parts[0], parts[1], scale, index)


def model_views(
    model: "Model",
    blocks: "Callable[[int], tuple[Tensor, ...]]",
    scales: Sequence[tuple[float, float]] = (),
    states: "Callable[[int], StateView | None]" = lambda layer: None,
) -> "list[KVView | StateView | BothViews]":
    """Return the KV caches of a model's layers, then of its prediction layer or draft model.

    blocks, states   return the tensors of a layer, as `KVArena.views` and `StateArena.view`
    """

    from quire.kernels.attention import KVView
    from quire.kernels.states import BothViews

    def views(layer: int, own: LayerArgs) -> "tuple[Tensor, ...] | StateView":
        if own.beside is not None:
            return blocks(layer)
        return states(layer) or (() if own.mixer == NONE else blocks(layer))

    def held(
        layers: Sequence[LayerArgs], places: Sequence[int], scales: Sequence[tuple[float, float]]
    ) -> "Iterator[KVView | StateView | BothViews]":
        """Yield the KV caches of layers, which are kept as those of the layers `places`."""
        parts = map(views, places, layers)
        for layer, own, kv in zip(places, layers, kv_views([one.mixer for one in layers], parts, scales), strict=True):
            state = None if own.beside is None else states(layer)
            yield kv if state is None or not isinstance(kv, KVView) else BothViews(kv, state)

    found = list(held(model.held, [model.args.kept_by(i) for i in range(len(model.held))], scales))
    if model.draft is not None:
        own, first = model.draft, len(found)
        found += held(own.held, [first + own.args.kept_by(i) for i in range(len(own.held))], ())
    return found

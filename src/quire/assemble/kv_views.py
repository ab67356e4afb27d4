"""Views of a KV cache: the tensors of each layer."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from quire.args.checkpoint import ModelArgs

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.attention import KVView
    from quire.layers.stack import Model


def kv_views(
    args: ModelArgs, components: Iterable[tuple["Tensor", ...]], scales: Sequence[tuple[float, float]] = ()
) -> "list[KVView]":
    """Return one `KVView` (`LatentView` for latent attention) per layer, those of draft layers last.

    components   per layer, the tensors of its KV cache: keys and values, or latent and rotated key
    scales       per layer, of keys and values in an 8-bit cache; (): all are 1
    """
    from quire.kernels.attention import KVView
    from quire.kernels.latent import LatentView

    own = chain(scales, repeat((1.0, 1.0)))  # draft layers have none
    if args.latent is not None:
        return [LatentView(*parts, next(own)[0]) for parts in components]
    return [KVView(*parts, *next(own)) for parts in components]


def model_views(
    model: "Model", views: "Callable[[int], tuple[Tensor, ...]]", scales: Sequence[tuple[float, float]] = ()
) -> "list[KVView]":
    """Return the KV caches of a model's layers, then of its prediction layer or draft model.

    views   returns the tensors of a layer's cache, as `KVArena.views`
    """
    own = len(model.layers) + len(model.drafts)
    found = kv_views(model.args, map(views, range(own)), scales)
    if model.draft is not None:
        found += kv_views(model.draft.args, map(views, range(own, own + len(model.draft.layers))))
    return found

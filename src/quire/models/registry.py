"""Facts of a model that plans need: linear layers, bytes, operations, KV cache. Only `kv_views` loads torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from quire.args.checkpoint import ModelArgs
from quire.config.placement import Parallel, Rank
from quire.config.resolve import CPU_BLOCK_SIZE, resolve_geometry
from quire.config.resolve_cuda import CUDA_BLOCK_SIZE
from quire.contracts.blocks import KVComponent, KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.params import Param, fused
from quire.kernels.linear.plan import LinearPlan, plan_linears
from quire.kernels.select import Choice
from quire.quantization.formats import num_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.attention import KVView
    from quire.layers.stack import Model

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNDER_WAY = 32  # experts, of two matrices each, that a rank sends at a time: `MOST_SENT` of distributed/process_group
CACHE_BYTES = ITEM_BYTES | {"float8_e4m3fn": 1, "float8_e5m2": 1}


def linear_plans(args: ModelArgs, params: Iterable[Param], choices: Iterable[Choice]) -> dict[str, LinearPlan]:
    """Return name of a linear layer -> plan of its kernel. `choices` holds the kernel chosen for each operation."""
    return plan_linears(params, choices, exact=args.moe is not None and args.moe.router_float)


def unpacked_bytes(params: Iterable[Param], dtype: str) -> int:
    """Return the size of the parameters in bytes before packing. `dtype` counts for parameters that name no dtype."""
    return sum(num_bytes(one, ITEM_BYTES[one.dtype or dtype]) for one in params)


def mover_bytes(params: Iterable[Param], parallel: Parallel, dtype: str) -> int:
    """Return the bytes that a rank takes while the experts of its largest layer move; 0 if experts have fixed places.

    Experts for all its slots may come, and copies of experts are under way to other ranks.
    """
    layers: dict[str, list[Param]] = {}
    for param in params if parallel.redundant is not None else ():
        if param.shard == "experts":
            layers.setdefault(param.module, []).append(param)
    largest = max(layers.values(), key=lambda layer: unpacked_bytes(layer, dtype), default=[])
    if not largest:
        return 0
    whole, slots = unpacked_bytes(largest, dtype), fused(largest[0])[0]
    return whole + min(UNDER_WAY, slots * (parallel.expert_ranks - 1)) * (whole // slots)


def check_routing(args: ModelArgs, routing: str) -> None:
    """Raise ConfigError for a routing that draws experts, and a model without experts."""
    if routing != "model" and args.moe is None:
        raise ConfigError(f"routing={routing} is for models with experts, which this one has not: leave it out.")


def operations(args: ModelArgs, blends: bool = False) -> tuple[str, ...]:
    """Return the names of the kernel operations that a model needs, except "experts": `MoEPlan` names its kernel.

    blends   True: its KV is reused at other positions, too
    """
    attention = ("latent",) if args.latent else ("heads", "attention")
    return ("norm", *attention, "activation", "linear", *(("routing",) if args.moe else ()), *("blend",) * blends)


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


def kv_components(args: ModelArgs, dtype: str) -> tuple[KVComponent, ...]:
    """Return the components of a layer's KV cache, in `dtype`.

    These are keys and values, each [kv head][token][head_dim]; with latent attention, the latent and the rotated key
    that all heads share.
    """
    if dtype not in CACHE_BYTES:
        raise ConfigError(f"a KV cache of dtype {dtype!r} is not possible: use one of {', '.join(CACHE_BYTES)}.")
    size = CACHE_BYTES[dtype]
    if args.latent is not None:
        widths = {"latent": args.latent.kv_rank, "rope": args.latent.rope_dim}
        return tuple(KVComponent(name, 1, width, dtype, size) for name, width in widths.items())
    return tuple(KVComponent(name, args.num_kv_heads, args.head_dim, dtype, size) for name in ("k", "v"))


def rank_geometry(args: ModelArgs, rank: Rank, *, dtype: str, device: str, block_size: int | None) -> KVGeometry:
    """Return the layout of a page of a rank's KV cache. dtype: of the cache; block_size: None: the device's default."""
    own = args if args.latent else replace(args, num_kv_heads=rank.kv_heads[1] - rank.kv_heads[0])
    default = CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE
    layers = rank.layers[1] - rank.layers[0] + args.draft_layers * rank.last
    return resolve_geometry(kv_components(own, dtype), layers, block_size, default)

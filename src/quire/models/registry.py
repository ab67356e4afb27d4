"""How a model is built, and what it keeps in the KV cache. No torch until one is built."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config.checkpoint import ModelArgs
from quire.config.placement import Rank
from quire.config.resolve import CPU_BLOCK_SIZE, resolve_geometry
from quire.config.resolve_cuda import CUDA_BLOCK_SIZE
from quire.contracts.blocks import KVComponent, KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.params import Param
from quire.kernels.linear.plan import LinearPlan, plan_linears
from quire.kernels.select import Choice
from quire.quantization.formats import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.attention import KVView

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def linear_plans(args: ModelArgs, params: Iterable[Param], choices: Iterable[Choice]) -> dict[str, LinearPlan]:
    """The plans of a model's linear layers, by name."""
    choice = next(choice for choice in choices if choice.op == "linear")
    return plan_linears(params, choice, exact=args.moe is not None and args.moe.router_float)


def unpacked_bytes(params: Iterable[Param], dtype: str) -> int:
    """Bytes of parameters as they are loaded, in `dtype` where they have no type of their own."""
    return sum(FORMATS[one.format].num_bytes(one.shape, ITEM_BYTES[one.dtype or dtype]) for one in params)


def check_routing(args: ModelArgs, routing: str) -> None:
    """Refuse "uniform" for a model without experts; raises ConfigError."""
    if routing == "uniform" and args.moe is None:
        raise ConfigError("routing=uniform is for models with experts, which this one has not: leave it out.")


def operations(args: ModelArgs) -> tuple[str, ...]:
    """The operations of `kernels/` that a model is made of; a `MoEPlan` has the experts' kernel."""
    attention = ("latent",) if args.latent else ("heads", "attention")
    return ("norm", *attention, "activation", "linear", *(("routing",) if args.moe else ()))


def kv_views(args: ModelArgs, components: Iterable[tuple["Tensor", ...]]) -> "list[KVView]":
    """What each layer's attention is given of its components in an arena, layer by layer."""
    from quire.kernels.attention import KVView
    from quire.kernels.latent import LatentView

    view = LatentView if args.latent is not None else KVView
    return [view(*parts) for parts in components]


def kv_components(args: ModelArgs, dtype: str) -> tuple[KVComponent, ...]:
    """What one layer keeps per page, in `dtype`: keys, then values, each [kv head][token][head_dim]; or the latent and
    the rotated key that all heads share."""
    size = ITEM_BYTES[dtype]
    if args.latent is not None:
        widths = {"latent": args.latent.kv_rank, "rope": args.latent.rope_dim}
        return tuple(KVComponent(name, 1, width, dtype, size) for name, width in widths.items())
    return tuple(KVComponent(name, args.num_kv_heads, args.head_dim, dtype, size) for name in ("k", "v"))


def rank_geometry(args: ModelArgs, rank: Rank, *, dtype: str, device: str, block_size: int | None) -> KVGeometry:
    """The page of a rank's KV cache: its layers and its KV heads; `block_size` as asked for."""
    own = args if args.latent else replace(args, num_kv_heads=rank.kv_heads[1] - rank.kv_heads[0])
    default = CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE
    return resolve_geometry(kv_components(own, dtype), rank.layers[1] - rank.layers[0], block_size, default)

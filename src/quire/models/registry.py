"""Which class implements a model_type, and how one is built. No torch until a model is built.

Knows names and what a model needs of the KV cache; nothing of the models' insides.
"""

import importlib
from typing import TYPE_CHECKING

from quire.config.checkpoint import ModelArgs
from quire.contracts.blocks import KVComponent
from quire.contracts.errors import ConfigError, UnsupportedModel
from quire.platforms.cpu import CpuFacts
from quire.platforms.cuda import CudaFacts

if TYPE_CHECKING:
    from quire.layers.stack import Model

MODELS: dict[str, str] = {
    "llama": "quire.models.llama:Llama",
    "mistral": "quire.models.mistral:Mistral",
    "qwen2": "quire.models.qwen2:Qwen2",
    "qwen3": "quire.models.qwen3:Qwen3",
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def build_model(
    args: ModelArgs, *, dtype: str, device: str, platform: CpuFacts | CudaFacts, kernels: dict[str, str] | None = None
) -> "Model":
    """An unloaded model: parameters are allocated, not filled. Next: load weights, then `model.pack()`.

    device     the platform's, or "meta": nothing is allocated, and the parameters can be counted
    dtype      what to compute in: "float32" or "bfloat16"
    kernels    operation -> implementation to force; ConfigError with the reasons when it cannot be
    """
    import torch

    from quire.kernels.select import select_kernels
    from quire.layers.context import Build

    if args.model_type not in MODELS:
        raise UnsupportedModel(f"model_type {args.model_type!r} is not implemented (one of {', '.join(MODELS)}).")
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}.")
    if device not in (platform.device, "meta"):
        raise ConfigError(f"device {device!r} does not match the platform {platform.device!r}.")
    module, _, name = MODELS[args.model_type].partition(":")
    chosen = select_kernels(platform.device, dtype, head_dim=args.head_dim, forced=kernels)
    build = Build(getattr(torch, dtype), torch.device(device), chosen)
    model: Model = getattr(importlib.import_module(module), name)(args, build)
    return model


def kv_components(args: ModelArgs, dtype: str) -> tuple[KVComponent, ...]:
    """What one layer keeps per page: keys, then values, each [kv head][token][head_dim] in `dtype`."""
    size = ITEM_BYTES[dtype]
    return tuple(KVComponent(name, args.num_kv_heads, args.head_dim, dtype, size) for name in ("k", "v"))

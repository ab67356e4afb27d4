"""Steps before a model is built, cheapest first: checks of config.json, checks of the weights' headers, the download.

No torch.
"""

from pathlib import Path
from typing import Any

from quire.config.checkpoint import ModelArgs, read_checkpoint_config, read_raw_config
from quire.config.engine import EngineConfig
from quire.config.quantized import read_quantization
from quire.config.resolve import (
    DTypePlan,
    check_context,
    check_cpu_weights,
    resolve_dtype,
    resolve_geometry,
    resolve_memory,
)
from quire.models.layout import layout
from quire.models.registry import check_routing, kv_components, unpacked_bytes
from quire.platforms.cpu import CpuFacts
from quire.weights.files import Checkpoint
from quire.weights.folder import fetch_weights
from quire.weights.match import match_tensors

Quantization = dict[str, Any]  # quantization_config, {} without one


def read_model(config: EngineConfig, folder: Path, device: str,
               cpu: CpuFacts) -> tuple[ModelArgs, DTypePlan, Quantization]:
    """Read the arguments, the compute type and the quantization of the model in `folder`; weights need not be there.

    Raises a `UserError` for a model that is not implemented, and for options that it cannot meet.
    """
    args = read_checkpoint_config(folder)
    check_context(config.model, args.max_position_embeddings)
    check_routing(args, config.load.routing)
    dtype = resolve_dtype(config.model.dtype, args.dtype, bool(cpu.bf16_units), device)
    return args, dtype, read_quantization(read_raw_config(folder), str(folder / "config.json"))


def obtain_weights(config: EngineConfig, folder: Path, args: ModelArgs, dtype: DTypePlan,
                   free_bytes: int | None) -> None:  # fmt: skip
    """Download the weights that `folder` lacks, unless their headers show that the model could not be loaded.

    free_bytes   memory that must hold the parameters, where it is known
    Raises a `UserError` that names the fix.
    """

    def check(checkpoint: Checkpoint) -> None:
        params = layout(args)
        match_tensors(checkpoint, params, args)
        if free_bytes is not None:
            stored = dtype.weights or dtype.dtype
            weights = unpacked_bytes(params, stored)
            check_cpu_weights(weights, free_bytes, stored)
            geometry = resolve_geometry(kv_components(args, dtype.dtype), args.num_layers, config.cache.block_size)
            resolve_memory(geometry, config.model, config.cache, context=args.max_position_embeddings,
                           max_num_seqs=config.scheduler.sequences(), free_bytes=free_bytes - weights)  # fmt: skip

    fetch_weights(config, folder, check)

"""The CPU half of the composition root."""

from collections.abc import Callable
from pathlib import Path

import torch

from quire.assemble.parts import Loading, Parts
from quire.config.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.config.resolve import DTypePlan, resolve_geometry, resolve_memory
from quire.config.resolve_cuda import gpu_only_options
from quire.kernels.attention import KVView
from quire.kvstore.arena import KVArena
from quire.models.registry import build_model, kv_components
from quire.platforms.cpu import CpuFacts, read_cpu_facts
from quire.procs.in_process import InProcessExecutor
from quire.weights.dummy import load_dummy
from quire.weights.load import load_weights
from quire.worker.sampler import Sampler
from quire.worker.sampling_table import SamplingTable
from quire.worker.slots import SlotTables
from quire.worker.worker import Worker

CPU = torch.device("cpu")


def assemble_cpu(config: EngineConfig, folder: Path, args: ModelArgs, dtype: DTypePlan, facts: CpuFacts, *,
                 on_loading: Loading, end_phase: Callable[[str], None]) -> Parts:
    """Build what runs on the CPU; raises a `UserError` that names the fix."""
    model = build_model(args, dtype=dtype.dtype, device="cpu", platform=facts)
    weight_bytes = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    if config.load.load_format == "dummy":
        load_dummy(model, config.model.seed)
    else:
        load_weights(model, folder, on_loading)
    model.pack()
    end_phase("weights")
    num_slots = config.scheduler.max_num_seqs
    geometry = resolve_geometry(kv_components(args, dtype.dtype), args.num_layers, config.cache.block_size)
    memory = resolve_memory(
        geometry,
        config.model,
        config.cache,
        context=args.max_position_embeddings,
        max_num_seqs=num_slots,
        free_bytes=read_cpu_facts().free_memory,
    )
    arena = KVArena(geometry, memory.num_blocks + 1, CPU)
    views = [KVView(*arena.views(layer)) for layer in range(args.num_layers)]
    sampling = SamplingTable(num_slots, args.vocab_size, memory.max_model_len)
    tables = SlotTables(sampling, num_slots, geometry.num_blocks(memory.max_model_len), CPU)
    worker = Worker(model, views, tables, Sampler(sampling), block_size=geometry.block_size)
    return Parts(
        config=config,
        model=model,
        worker=worker,
        executor=lambda facts: InProcessExecutor(worker.run, facts),
        depth=config.device.async_depth or 1,
        memory=memory,
        weight_bytes=weight_bytes,
        notes=gpu_only_options(config),
    )

"""Where a worker runs each step to its end before it takes the next: on a CPU, and on a GPU without Triton."""

from collections.abc import Callable
from pathlib import Path

import torch

from quire.assemble.parts import Loading, Parts, RunnerReport
from quire.config.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.config.resolve import DTypePlan, resolve_geometry, resolve_memory
from quire.kvstore.arena import KVArena
from quire.models.registry import build_model, kv_components, kv_views
from quire.platforms.cpu import CpuFacts
from quire.platforms.cuda import CudaFacts
from quire.procs.in_process import InProcessExecutor
from quire.weights.dummy import load_dummy
from quire.weights.load import load_weights
from quire.worker.construct import make_runner
from quire.worker.device_state import Limits


def assemble_plain(config: EngineConfig, folder: Path, args: ModelArgs, dtype: DTypePlan, facts: CpuFacts | CudaFacts,
                   *, free_bytes: Callable[[], int], on_loading: Loading, end_phase: Callable[[str], None]) -> Parts:
    """Build what runs on the device of `facts`; raises a `UserError` that names the fix.

    free_bytes   says how much of the device's memory is free
    """
    device = torch.device(facts.device)
    model = build_model(args, dtype=dtype.dtype, device=facts.device, platform=facts, routing=config.load.routing)
    weight_bytes = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    if config.load.load_format == "dummy":
        load_dummy(model, config.model.seed)
    else:
        load_weights(model, folder, on_loading)
    model.pack()
    end_phase("weights")
    num_slots = config.scheduler.sequences()
    geometry = resolve_geometry(kv_components(args, dtype.dtype), args.num_layers, config.cache.block_size)
    memory = resolve_memory(
        geometry,
        config.model,
        config.cache,
        context=args.max_position_embeddings,
        max_num_seqs=num_slots,
        free_bytes=free_bytes(),
    )
    arena = KVArena(geometry, memory.num_blocks + 1, device)
    views = kv_views(args, map(arena.views, range(args.num_layers)))
    limits = Limits(num_slots=num_slots, max_tokens=config.scheduler.token_budget(), block_size=geometry.block_size,
                    max_model_len=memory.max_model_len)  # fmt: skip
    worker = make_runner(model, views, limits, device, target=facts.device)
    return Parts(
        config=config,
        model=model,
        worker=worker,
        executor=lambda facts: InProcessExecutor(worker.run, facts),
        depth=config.device.async_depth or 1,
        memory=memory,
        weight_bytes=weight_bytes,
        plans={"runner": RunnerReport(worker)},
    )

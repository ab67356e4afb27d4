"""The GPU's half of the composition root: weights, the KV cache in what is left, graphs, the executor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch

from quire.assemble.parts import Loading, Parts, RunnerReport
from quire.assemble.plain import assemble_plain
from quire.config.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.config.resolve import DTypePlan, resolve_geometry
from quire.config.resolve_cuda import (
    CUDA_BLOCK_SIZE,
    DeviceMemory,
    check_sequences,
    check_weights,
    no_room_for_steps,
    resolve_batch,
    resolve_cuda_memory,
)
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import SAMPLE, Admission, StepPlan
from quire.kernels.cache import compiling_ahead, use_cache_folder
from quire.kernels.triton_runtime import missing
from quire.kvstore.arena import KVArena
from quire.layers.stack import Model
from quire.models.layout import layout, parameters_per_token
from quire.models.registry import ITEM_BYTES, build_model, kv_components, kv_views
from quire.platforms.cuda import read_cuda_facts
from quire.procs.launching import LaunchingExecutor
from quire.weights.dummy import load_dummy
from quire.weights.stream import stream_weights
from quire.worker.construct import make_runner
from quire.worker.device_state import Limits
from quire.worker.graphs import graph_sizes, graph_tokens
from quire.worker.packed import WORDS
from quire.worker.runner import StepRunner

DEPTH = 2
PROMPT_CHUNK = 256  # tokens that a GPU multiplies with weights in the time that reading them takes
LAUNCH_SECONDS = 0.025  # of the host, for a step whose kernels are launched one by one
FLOPS = 600e12  # of a GPU, in a large product
LATENT_TOKENS = 1024  # of a captured step: in one, prompts attend to latents, which costs more the longer they are
LATENT_CONTEXT = 32768  # tokens before the largest step: what is made of them fills the workspace
GRAPH_BYTES = 24 << 20  # set aside for the graphs of one size: six of them took 9 to 14 MiB (H200, docs/log.md)
DEVICE = torch.device("cuda", 0)


def assemble_cuda(config: EngineConfig, folder: Path, args: ModelArgs, dtype: DTypePlan, *,
                  on_loading: Loading, end_phase: Callable[[str], None], served: bool) -> Parts:
    """Build what runs on the GPU; raises a `UserError` that names what would make it fit.

    end_phase   told the name of each part of the start when it is over
    """
    facts = read_cuda_facts()
    weights = sum(prod(param.shape) * ITEM_BYTES[param.dtype or dtype.dtype] for param in layout(args))
    wide = args.moe is not None and not served and weights <= facts.total_memory // 2  # else they would cost context
    batch = resolve_batch(config.scheduler, facts.total_memory, wide)
    config = replace(config, scheduler=batch)
    check_sequences(config)
    check_weights(weights, facts.total_memory, facts.free_memory, config, dtype=dtype.dtype)
    end_phase("device")
    if why := missing():
        parts = assemble_plain(config, folder, args, dtype, facts, on_loading=on_loading, end_phase=end_phase,
                               free_bytes=lambda: torch.cuda.mem_get_info(DEVICE)[0])  # fmt: skip
        note = f"no Triton kernel can run ({why}): PyTorch's own operations do the work, without graphs, much slower."
        return replace(parts, hardware=str(facts), notes=(note,))
    cache, note = use_cache_folder()
    model = build_model(args, dtype=dtype.dtype, device="cuda", platform=facts, routing=config.load.routing)
    loaded = _load(model, config, folder, on_loading)
    end_phase("weights")
    geometry = resolve_geometry(kv_components(args, dtype.dtype), args.num_layers, config.cache.block_size,
                                CUDA_BLOCK_SIZE)  # fmt: skip
    limits = Limits(
        num_slots=batch.sequences(), max_tokens=batch.token_budget(), block_size=geometry.block_size,
        max_model_len=config.model.max_model_len or args.max_position_embeddings, graph_sizes=_graph_sizes(config),
        graph_tokens=_graph_tokens(config, args),
        depth=config.device.async_depth or DEPTH,
    )  # fmt: skip
    with _room_for_steps(weights, facts.free_memory, config):
        compiled, working, per_seq, per_token = _rehearse(model, geometry, limits)
    end_phase("kernels")
    torch.cuda.empty_cache()
    measured = DeviceMemory(
        total=facts.total_memory, at_start=facts.free_memory, free=torch.cuda.mem_get_info(DEVICE)[0], weights=weights,
        later=working + (len(limits.graph_sizes) + len(limits.graph_tokens)) * GRAPH_BYTES,
        others=facts.others_memory, per_seq=per_seq, per_token=per_token,
    )  # fmt: skip
    memory = resolve_cuda_memory(geometry, config, measured, context=args.max_position_embeddings, dtype=dtype.dtype)
    limits = replace(limits, max_model_len=memory.max_model_len)
    with _room_for_steps(weights, facts.free_memory, config):
        worker = _worker(model, geometry, memory.num_blocks + 1, limits)
        worker.warm_up()
    end_phase("graphs")
    return Parts(
        config=config,
        model=model,
        worker=worker,
        executor=lambda facts: LaunchingExecutor(worker, facts),
        depth=limits.depth,
        memory=memory,
        weight_bytes=weights,
        prompt_chunk=PROMPT_CHUNK,
        hardware=str(facts),
        plans={"compiled kernels": f"{compiled} in {cache}", "weights": loaded, "memory": str(memory.budget),
               "graphs": f"{len(worker.recorder)}", "runner": RunnerReport(worker)},
        notes=(note,) if note else (),
    )


@contextmanager
def _room_for_steps(weights: int, free: int, config: EngineConfig) -> Iterator[None]:
    """What runs out of memory inside says what would need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(no_room_for_steps(weights, free, config)) from error


def _load(model: Model, config: EngineConfig, folder: Path, on_loading: Loading) -> str:
    """Fill and pack a model; what was read, in words."""
    loaded = "dummy"
    if config.load.load_format == "dummy":
        load_dummy(model, config.model.seed)
    else:
        loaded = str(stream_weights(model, folder, on_loading))
    model.pack()
    return loaded


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """How many sequences the decode steps have that are captured."""
    device, most = config.device, config.scheduler.sequences()
    if device.enforce_eager:
        return ()
    most = min(most, device.max_cudagraph_capture_size or most)
    asked = tuple(sorted({size for size in device.cudagraph_capture_sizes if size <= most}))
    return asked or graph_sizes(most)


def _graph_tokens(config: EngineConfig, args: ModelArgs) -> tuple[int, ...]:
    """Token counts of the captured steps with prompts: those that the GPU would finish before they were launched."""
    if config.device.enforce_eager or config.device.cudagraph_capture_sizes:
        return ()
    most = int(LAUNCH_SECONDS * FLOPS / (2 * parameters_per_token(args)))
    if args.latent is not None:
        most = min(most, LATENT_TOKENS)
    return graph_tokens(min(most, config.device.max_cudagraph_capture_size or most, config.scheduler.token_budget()))


def _worker(model: Model, geometry: KVGeometry, num_blocks: int, limits: Limits) -> StepRunner:
    arena = KVArena(geometry, num_blocks, DEVICE)
    views = kv_views(model.args, map(arena.views, range(model.args.num_layers)))
    return make_runner(model, views, limits, DEVICE, target="cuda")


def _rehearse(model: Model, geometry: KVGeometry, limits: Limits) -> tuple[str, int, int, int]:
    """Compile every kernel and run the largest step once, on a cache that just holds it: (what was compiled; the bytes
    of everything but weights and cache; those of them that a slot takes in tables; and a token in activations)."""
    blocks = geometry.num_blocks(limits.max_tokens) + limits.num_slots + 2
    before = torch.cuda.memory_allocated(DEVICE) + blocks * geometry.page_bytes
    worker = _worker(model, geometry, blocks, limits)
    tables = torch.cuda.memory_allocated(DEVICE) - before
    past = LATENT_CONTEXT if model.args.latent else 0
    plans = [_largest_step(limits, 1, past), _largest_step(limits, limits.num_slots)]
    with compiling_ahead() as ahead:
        worker.rehearse(plans)
    if ahead.report().failed:
        name, why = ahead.report().failed[0]
        raise ConfigError(f"the kernel {name} cannot be compiled for this GPU ({why}): use the versions of PyTorch and "
                          "Triton that Quire is tested with, or --device cpu.")
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for plan in plans:
        worker.submit(plan)
        worker.collect()
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    per_seq = (tables - 4 * WORDS) // limits.num_slots
    return str(ahead.report()), peak, per_seq, (peak - tables) // limits.max_tokens


def _largest_step(limits: Limits, num_seqs: int, past: int = 0) -> StepPlan:
    """As many tokens as a step may have, in `num_seqs` sequences of one length, all sampled; `past` more were computed
    before, where the context allows. Their blocks are those of the tokens, over and over."""
    tokens = min(limits.max_tokens // num_seqs, limits.max_model_len - 1)
    blocks = -(-tokens // limits.block_size)
    past = min(past, limits.max_model_len - 1 - tokens) // limits.block_size * limits.block_size
    places = np.arange(blocks + past // limits.block_size, dtype=np.int32) % blocks
    slots = np.arange(num_seqs, dtype=np.int32)
    spec = SamplerSpec(temperature=0.8, top_p=0.9, seed=0, num_prompt=past + tokens)
    admitted = tuple(
        Admission(
            slot=slot, request_id="", token_ids=np.zeros(past + tokens, np.int32), num_computed=past, sampler=spec,
            block_ids=(1 + slot * blocks + places,),
        )
        for slot in range(num_seqs)
    )  # fmt: skip
    return StepPlan(
        step=0, slots=slots, num_tokens=np.full(num_seqs, tokens, np.int32), num_rows=np.ones(num_seqs, np.int32),
        outputs=np.full(num_seqs, SAMPLE, np.uint8), admitted=admitted, released=slots,
    )  # fmt: skip

"""Assembly of an engine on a GPU: weights, the KV cache in the memory that is left, CUDA graphs, the executor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import lcm

import msgspec
import numpy as np
import torch

from quire.assemble.build import build_model
from quire.assemble.cpu import fill, load_without_triton
from quire.assemble.held_memory import Regions, empty_of, hold_memory, make_regions
from quire.assemble.kv_views import model_views
from quire.assemble.loaded import Loaded, Loading, Outside, Parts, cache_scales, cache_words
from quire.assemble.offload import copy_blocks
from quire.assemble.states import keep_states
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32, SAMPLE, Admission, BlendedChunk, PlanFeatures, StageRuns, StepPlan, StepSync
from quire.distributed.mesh import RankGroups
from quire.kernels.compile_cache import compiling_ahead, use_cache_folder
from quire.kernels.step.packed import WORDS
from quire.kernels.step.state import Exchanges, Limits
from quire.kernels.triton_runtime import missing
from quire.kvstore.arena import KVArena
from quire.kvstore.states import StateArena
from quire.layers.stack import Model
from quire.plan.collectives import exchange_bounds
from quire.plan.cuda_memory import DeviceMemory, check_weights, no_room_for_steps
from quire.plan.drafts import joint_drafts
from quire.plan.engine import EnginePlan, host_layers
from quire.plan.joined import short_decodes
from quire.plan.kinds import mixers
from quire.plan.meetings import check
from quire.plan.memory import MemoryPlan
from quire.plan.tiers import resolve_offload
from quire.platforms.cuda import CudaFacts
from quire.procs.async_executor import LaunchingExecutor
from quire.weights.cache_scales import Scales
from quire.worker.construct import make_runner
from quire.worker.profile import controls_of
from quire.worker.runner import StepRunner

DEPTH = 2
FEW_KEPT = (7, 15)  # moved tokens of rehearsed steps: so few rows of a prompt attend to latents that are not expanded
MIDDLE = 16  # slots of a rehearsed step: kernels choose their tiles by the number of rows
PROMPT_CHUNK = 256  # tokens that a GPU multiplies with weights in the time that reading them takes
DEVICE = torch.device("cuda")  # the current device of the thread


def load_cuda(
    plan: EnginePlan, groups: RankGroups, facts: CudaFacts, *, on_loading: Loading, end_phase: Callable[[str], None]
) -> Loaded:
    """Load the model of a rank's plan on a GPU; raises a `UserError` that names options with which the model fits.

    facts   name and memory of the GPU. For the other parameters see `load_rank`
    """
    check(plan.meetings)
    config, weights = plan.config, plan.weight_bytes - host_layers(plan).saved
    check_weights(weights, facts.total_memory, facts.free_memory, config, dtype=plan.weight_words)
    end_phase("device")
    if why := missing():
        given = {"on_loading": on_loading, "end_phase": end_phase}
        slow = load_without_triton(plan, groups, free_bytes=_free_bytes, **given)
        note = f"no Triton kernel can run ({why}): PyTorch's own operations do the work, without graphs, much slower."
        return replace(slow, finish=lambda *given: replace(slow.finish(*given), notes=(note,)))
    cache, note = use_cache_folder()
    scales, model = cache_scales(plan), build_model(plan, groups)
    filled = fill(model, plan, scales, on_loading)
    regions = make_regions(plan, model)
    end_phase("weights")
    limits = _limits(plan, groups)
    with _room_for_steps(weights, facts.free_memory, config):
        compiled, working, per_seq, per_token = _rehearse(model, plan, limits, scales, groups)
    end_phase("kernels")
    torch.cuda.empty_cache()

    def measure() -> DeviceMemory:
        return DeviceMemory(
            total=facts.total_memory,
            at_start=facts.free_memory,
            free=_free_bytes(),
            weights=weights,
            later=working + plan.graphs.num_bytes + plan.scratch_bytes,
            others=facts.others_memory,
            per_seq=per_seq,
            per_token=per_token,
        )

    def finish(memory: MemoryPlan, outside: Outside) -> Parts:
        sized = replace(limits, max_model_len=memory.max_model_len)
        with _room_for_steps(weights, facts.free_memory, config):
            worker, *arenas = _worker(
                model, plan, memory.num_blocks + 1, sized, scales, groups, checkpoints=memory.checkpoints, held=regions
            )
            tiers = copy_blocks(worker, plan, memory, (arenas[0], arenas[1]), outside)
            worker.warm_up()
        end_phase("graphs")
        return Parts(
            plan=plan,
            model=model,
            worker=worker,
            depth=sized.depth,
            memory=memory,
            prompt_chunk=PROMPT_CHUNK,
            executor=lambda facts: LaunchingExecutor(worker, facts, controls_of(worker)),
            notes=(note,) if note else (),
            tiers=tiers,
            namespace=outside.namespace,
            plans={
                "compiled kernels": f"{compiled} in {cache}",
                "weights": filled.words,
                "memory": str(memory.budget),
                "graphs": f"{len(worker.recorder)}",
                "cache": cache_words(plan, scales),
            },
        )

    return Loaded(measure, finish, filled.sums)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info(DEVICE)[0]


def _limits(plan: EnginePlan, groups: RankGroups) -> Limits:
    """Return the sizes of a runner, with the longest context that was asked for."""
    config = plan.config
    return Limits(
        num_slots=config.scheduler.sequences(),
        max_tokens=config.scheduler.token_budget(),
        block_sizes=plan.geometry.block_sizes,
        max_model_len=config.model.max_model_len or plan.args.max_position_embeddings,
        graph_sizes=plan.graphs.sequences,
        graph_tokens=plan.graphs.tokens,
        depth=config.device.async_depth or DEPTH,
        windows=plan.geometry.windows,
        num_drafts=plan.drafting.num_drafts,
        draft_lengths=plan.graphs.drafts,
        exchanges=Exchanges(
            bounds=plan.graphs.bounds if groups.slots is None else exchange_bounds(plan.step_tokens),
            even=plan.graphs.even,
            joint=joint_drafts(plan),
        ),
        tiers=resolve_offload(config).host_bytes > 0,
        adapters=config.adapters.enable_lora,
        short=short_decodes(plan),
    )


@contextmanager
def _room_for_steps(weights: int, free: int, config: EngineConfig) -> Iterator[None]:
    """Turn an out-of-memory error inside into a ConfigError that names the options which need less memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(no_room_for_steps(weights, free, config)) from error


def _worker(
    model: Model,
    plan: EnginePlan,
    num_blocks: int,
    limits: Limits,
    scales: list[Scales],
    groups: RankGroups,
    *,
    checkpoints: int = 0,
    held: Regions | None = None,
) -> tuple[StepRunner, KVArena, StateArena]:
    """Make a runner with a KV cache of `num_blocks` blocks, and states of its slots and of checkpoints.

    held   memory that sleep frees, of the runner that serves; None: the engine does not sleep, or this is a rehearsal
    """
    empty = empty_of(held)
    arena = KVArena(plan.geometry, num_blocks, DEVICE, empty)
    states = StateArena(plan.geometry, limits.num_slots + 1 + checkpoints, DEVICE, empty)
    views = model_views(model, arena.views, scales, states.view)
    worker = make_runner(model, views, limits, DEVICE, target="cuda", groups=groups, speculation=plan.speculation)
    keep_states(worker, states)
    hold_memory(worker, model, plan, scales, held)
    return worker, arena, states


def _rehearse(
    model: Model, plan: EnginePlan, limits: Limits, scales: list[Scales], groups: RankGroups
) -> tuple[str, int, int, int]:
    """Compile every kernel and run the largest steps once, on a KV cache that just holds them.

    Returns a report of the compilation, the bytes of everything but weights and cache, and of these the bytes per slot
    (tables, states) and per token (activations). With replicas in lock-step they include the exchange in the memory of
    graphs.
    """
    geometry = plan.geometry
    blocks = geometry.table_entries(limits.step_tokens) + len(geometry.groups) * limits.num_slots + 2
    before = torch.cuda.memory_allocated(DEVICE) + blocks * geometry.page_bytes
    worker, _, _ = _worker(model, plan, blocks, limits, scales, groups)
    tables = torch.cuda.memory_allocated(DEVICE) - before
    plans, compiled = _rehearsed(plan, limits, max(kind.past for kind in mixers(model.args)), groups.pp is not None)
    with compiling_ahead() as ahead:
        worker.rehearse([*plans, *compiled])
    if ahead.report().failed:
        name, why = ahead.report().failed[0]
        raise ConfigError(
            f"the kernel {name} cannot be compiled for this GPU ({why}): use the versions of PyTorch and "
            "Triton that Quire is tested with, or --device cpu."
        )
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for step in plans:
        worker.submit(step)
        worker.collect()
    for feature in worker.features.settle:
        feature.settle()  # the next runner uses the same groups
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    per_seq = (tables - 4 * WORDS) // limits.num_slots
    captured = _exchange_bytes(worker) if limits.exchanges.bounds and limits.graph_sizes else 0
    # Divided contexts of prompts may be longer than the rehearsed one.
    later = peak + captured + geometry.gathered_bytes(limits.max_model_len, limits.num_slots)
    return str(ahead.report()), later, per_seq, (peak - tables) // limits.step_tokens


def _rehearsed(plan: EnginePlan, limits: Limits, past: int, staged: bool) -> tuple[list[StepPlan], list[StepPlan]]:
    """Return the largest steps, which run once, and more steps whose kernels are compiled alone.

    past     tokens before the largest step, see `Mixer`. Kernels are others where fewer tokens stand before a prompt
    staged   True: the rank is one of a pipeline
    """
    plans = [_largest_step(limits, 1, past), _largest_step(limits, limits.num_slots)]
    compiled = [_largest_step(limits, 1, past // 2)] if past else []
    if widened := max(plan.widened_tokens):  # a step that reads more than the scratch holds
        compiled.append(_largest_step(limits, limits.num_slots, widened // limits.num_slots))
    if staged and limits.num_drafts:
        plans = [_drafting_step(one, limits) for one in plans]
        compiled.append(_drafting_step(_largest_step(limits, min(MIDDLE, limits.num_slots)), limits))
    if plan.config.cache.enable_cache_blend:
        plans.append(_blended_step(limits))
        compiled += [_blended_step(limits, most) for most in FEW_KEPT]
    return plans, compiled


def _exchange_bytes(worker: StepRunner) -> int:
    """Return the bytes that the experts of the largest exchange take, measured in a step without tokens here.

    Graphs have memory of their own, in which each of them may take as much. Every rank must call this.
    """
    limits, before = worker.limits, torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    none = np.zeros(0, np.int32)
    worker.submit(
        StepPlan(
            step=0,
            slots=none,
            num_decodes=0,
            num_tokens=none,
            num_rows=none,
            outputs=none.astype(np.uint8),
            sync=StepSync((limits.exchanges.bounds[-1],) * limits.exchanges.replicas),
        )
    )
    worker.collect()
    return torch.cuda.max_memory_allocated(DEVICE) - before


def _blended_step(limits: Limits, most: int = 1 << 30) -> StepPlan:
    """Return the largest step of a sequence whose tokens but the last reuse KV. Half are kept, at most `most`."""
    step = _largest_step(limits, 1)
    tokens = np.arange(int(step.num_tokens[0]) - 1, dtype=np.int32)
    chunk = BlendedChunk(
        slot=0,
        tokens=tokens,
        sources=np.stack([size + tokens for size in limits.block_sizes]),
        shifts=tokens // 2,
        num_kept=min(most, len(tokens) // 2),
    )
    return msgspec.structs.replace(step, features=PlanFeatures(blended=(chunk,)))


def _drafting_step(step: StepPlan, limits: Limits) -> StepPlan:
    """Return a step at whose end the last stage of a pipeline launches its drafts for all slots."""
    none, every = np.zeros(0, np.int32), np.ones(len(step.slots), np.int32)
    runs = StageRuns(
        slots=none, lengths=none, begins=none, counts=none, tokens=none, limits=every, most=limits.num_drafts
    )
    return msgspec.structs.replace(step, features=PlanFeatures(runs=runs))


def _largest_step(limits: Limits, num_seqs: int, past: int = 0) -> StepPlan:
    """Return the plan of a step with as many tokens as allowed, in `num_seqs` sampled sequences of equal length.

    past   tokens computed before, as far as the context allows; they share the blocks of the step's own tokens
    """
    tokens, whole = min(limits.step_tokens // num_seqs, limits.max_model_len - 1), lcm(*limits.block_sizes)
    past = min(past, limits.max_model_len - 1 - tokens) // whole * whole

    def blocks(slot: int, size: int) -> I32:
        own = -(-tokens // size)
        return 1 + slot * own + np.arange(own + past // size, dtype=np.int32) % own

    slots = np.arange(num_seqs, dtype=np.int32)
    spec = SamplerSpec(temperature=0.8, top_p=0.9, seed=0, num_prompt=past + tokens)
    admitted = tuple(
        Admission(
            slot=slot,
            request_id="",
            token_ids=np.zeros(past + tokens, np.int32),
            num_computed=past,
            sampler=spec,
            block_ids=tuple(blocks(slot, size) for size in limits.block_sizes),
        )
        for slot in range(num_seqs)
    )
    return StepPlan(
        step=0,
        slots=slots,
        num_decodes=0,
        num_tokens=np.full(num_seqs, tokens, np.int32),
        num_rows=np.ones(num_seqs, np.int32),
        outputs=np.full(num_seqs, SAMPLE, np.uint8),
        admitted=admitted,
        released=slots,
    )

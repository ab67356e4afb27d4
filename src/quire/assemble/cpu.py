"""Assembly of an engine on a CPU. It is also the fallback of `cuda.py` on a GPU where no Triton kernel can run.

The engine runs without CUDA graphs. Without `async_depth` it finishes each step before the next begins.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quire.assemble.build import build_model
from quire.assemble.held_memory import empty_of, hold_memory, make_regions
from quire.assemble.kv_views import model_views
from quire.assemble.loaded import Filled, Loaded, Loading, Outside, Parts, cache_scales, cache_words
from quire.assemble.offload import copy_blocks
from quire.assemble.states import keep_states
from quire.distributed.mesh import RankGroups
from quire.kernels.step.state import Limits
from quire.kvstore.arena import KVArena
from quire.kvstore.states import StateArena
from quire.layers.stack import Model
from quire.plan.engine import EnginePlan
from quire.plan.meetings import check
from quire.plan.memory import MemoryPlan
from quire.procs.in_process import InProcessExecutor
from quire.weights.cache_scales import Scales
from quire.weights.digest import fact
from quire.weights.dummy import load_dummy
from quire.weights.load import load_weights
from quire.worker.construct import make_runner
from quire.worker.profile import controls_of


def load_without_triton(
    plan: EnginePlan,
    groups: RankGroups,
    *,
    free_bytes: Callable[[], int],
    on_loading: Loading,
    end_phase: Callable[[str], None],
) -> Loaded:
    """Load the model of a rank's plan for a device without Triton kernels: a CPU, or a GPU that cannot run them.

    free_bytes   returns the free bytes of the device's memory. For the other parameters see `load_rank`
    """
    check(plan.meetings)
    scales = cache_scales(plan)
    model = build_model(plan, groups)
    filled = fill(model, plan, scales, on_loading)
    end_phase("weights")
    return Loaded(free_bytes, partial(_finish, plan, model, scales, groups), filled.sums)


def _finish(
    plan: EnginePlan, model: Model, scales: list[Scales], groups: RankGroups, memory: MemoryPlan, outside: Outside
) -> Parts:
    device = torch.device(plan.machine.device)
    num_slots = memory.num_slots or plan.config.scheduler.sequences()
    regions = make_regions(plan, model)
    empty = empty_of(regions)
    arena = KVArena(memory.geometry, memory.num_blocks + 1, device, empty)
    states = StateArena(memory.geometry, num_slots + 1 + memory.checkpoints, device, empty)
    views = model_views(model, arena.views, scales, states.view)
    limits = Limits(
        num_slots=num_slots,
        max_tokens=plan.config.scheduler.token_budget(),
        block_sizes=memory.geometry.block_sizes,
        max_model_len=memory.max_model_len,
        windows=memory.geometry.windows,
        num_drafts=plan.drafting.num_drafts,
    )
    worker = make_runner(
        model,
        views,
        limits,
        device,
        target=plan.machine.device,
        groups=groups,
        eager=plan.config.device.enforce_eager,
        speculation=plan.speculation,
    )
    keep_states(worker, states)
    hold_memory(worker, model, plan, scales, regions)
    tiers = copy_blocks(worker, plan, memory, (arena, states), outside)
    return Parts(
        plan=plan,
        model=model,
        worker=worker,
        executor=lambda facts: InProcessExecutor(worker.run, facts, controls_of(worker)),
        depth=plan.config.device.async_depth or 1,
        memory=memory,
        plans={"cache": cache_words(plan, scales)},
        tiers=tiers,
        namespace=outside.namespace,
    )


def fill(model: Model, plan: EnginePlan, scales: list[Scales], on_loading: Loading, role: str = "model") -> Filled:
    """Load the weights of a model, and of its draft model or EAGLE head, into its layers, which repack them.

    scales   of the KV cache, from the checkpoint
    role     of the model in the sums of what is read, which are taken if KV blocks leave the engine
    """
    load, sums = plan.config.load, b""
    if model.draft is not None and plan.draft is not None:
        sums = fill(model.draft, plan.draft, [], on_loading, "draft").sums
    device = torch.device("cpu") if load.load_device == "cpu" else None
    if load.load_format == "dummy":
        load_dummy(model, plan.config.model.seed, device)
        words, own = "dummy", fact(f"{role} dummy", _made_up(plan))
    else:
        summed_as = role if plan.offload.outside else ""
        report = load_weights(model, Path(plan.folder), on_loading, device=device, summed_as=summed_as)
        words, own = str(report), report.sums + (fact(f"{role} cache", scales) if summed_as else b"")
    if model.streamed is not None:
        model.streamed.ready(model.device)
    return Filled(words, sums + own)


def _made_up(plan: EnginePlan) -> list[object]:
    """Return what random weights depend on: each tensor of a rank begins with the same numbers."""
    experts = plan.experts.experts if plan.experts else ""
    return [
        plan.config.model.seed,
        str(plan.mesh.parallel.together),
        plan.machine.device,
        plan.config.load.load_device,
        experts,
    ]

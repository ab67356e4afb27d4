"""Sizes of the KV cache and of its tiers, from a plan and measured memory. No torch."""

import math
from dataclasses import replace

from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.plan.cuda_memory import DeviceMemory, resolve_cuda_memory
from quire.plan.engine import EnginePlan
from quire.plan.memory import GIB, MemoryPlan, as_gib, resolve_memory
from quire.plan.state_memory import StateUse, divide_tier, state_use


def resolve_sizing(plan: EnginePlan, measured: DeviceMemory | int) -> MemoryPlan:
    """Size the KV cache and the context length.

    measured   a GPU's memory after the largest step. On a CPU: free bytes beside the weights, before the buffers for
               exchanges with other ranks are allocated
    Raises ConfigError, which names options that make the model fit.
    """
    config, context = plan.config, plan.args.max_position_embeddings
    drafts = plan.speculation.num_drafts if plan.speculation else 0
    chunk = plan.step_tokens + 2 * (1 + drafts)  # or of a request in two steps
    if isinstance(measured, DeviceMemory):
        sizes = resolve_cuda_memory(
            plan.geometry, config, measured, context=context, chunk=chunk, dtype=plan.weight_words, states=use_of(plan)
        )
    else:
        same = plan.machine.device == "cpu"  # the host's memory is the device's
        offloaded = plan.offload.host_bytes // plan.mesh.parallel.size if same else 0
        if offloaded > measured:
            raise ConfigError(
                f"kv_offload_gb={plan.offload.host_bytes / GIB:g}: each rank needs {offloaded / GIB:.1f} "
                f"GiB of host memory, and {measured / GIB:.1f} GiB are free: lower kv_offload_gb."
            )
        sizes = resolve_memory(
            plan.geometry,
            config.model,
            config.cache,
            context=context,
            chunk=chunk,
            max_num_seqs=config.scheduler.sequences(),
            free_bytes=max(0, measured - plan.buffer_bytes - offloaded),
            states=use_of(plan),
        )
    blocks, checkpoints = _host_tier(plan, sizes)
    return replace(sizes, host_blocks=blocks, host_checkpoints=checkpoints)


def use_of(plan: EnginePlan) -> StateUse:
    """Return the use of states of a plan."""
    sharing = plan.offload.sharing
    return state_use(plan.config, elsewhere=bool(plan.offload.folder or sharing.peers or sharing.takes))


def host_bytes(plan: EnginePlan) -> int:
    """Return the bytes of the host tier of this rank."""
    return plan.offload.host_bytes // plan.mesh.parallel.size


def _host_tier(plan: EnginePlan, sizes: MemoryPlan) -> tuple[int, int]:
    """Return the blocks and the checkpoints of the host tier of this rank. Raises ConfigError when it lacks room."""
    if not plan.offload.host_bytes:
        return 0, 0
    geometry, ranks = plan.geometry, plan.mesh.parallel.size
    kept = sizes.checkpoints if use_of(plan).per_slot else 0  # the mover of checkpoints has at least one
    for_blocks, for_states = divide_tier(geometry, host_bytes(plan), sizes.kv_bytes, kept)
    blocks = for_blocks // geometry.page_bytes
    if blocks < len(geometry.groups):
        states = f" and a checkpoint of {as_gib(geometry.state_bytes)}" * bool(geometry.states)
        least = rounded_up((_least_tier(geometry, sizes.kv_bytes, kept) + 1) * ranks / GIB)
        raise ConfigError(
            f"kv_offload_gb={plan.offload.host_bytes / GIB:g} for {ranks} rank{'s' * (ranks > 1)} does "
            f"not hold a KV block of {as_gib(geometry.page_bytes)}{states} each: "
            f"raise kv_offload_gb to {least} or more."
        )
    return blocks, for_states // geometry.state_bytes if geometry.states else 0


def _least_tier(geometry: KVGeometry, kv_bytes: int, checkpoints: int) -> int:
    """Return the least bytes of a tier whose part for KV blocks holds one of each group (`divide_tier`)."""
    low, high = 0, 1
    enough = len(geometry.groups) * geometry.page_bytes
    while divide_tier(geometry, high, kv_bytes, checkpoints)[0] < enough:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        holds = divide_tier(geometry, middle, kv_bytes, checkpoints)[0] >= enough
        low, high = (low, middle) if holds else (middle, high)
    return high


def rounded_up(number: float) -> str:
    """Return a number above 0 as an option that is given, rounded up to 3 digits."""
    place = 2 - math.floor(math.log10(number))
    return f"{math.ceil(number * 10.0**place) / 10.0**place:.3g}"

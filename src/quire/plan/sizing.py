"""Sizes of the KV cache and of its tiers, from a plan and measured memory. No torch."""

from dataclasses import replace

from quire.contracts.errors import ConfigError
from quire.plan.cuda_memory import DeviceMemory, resolve_cuda_memory
from quire.plan.engine import EnginePlan
from quire.plan.memory import GIB, MemoryPlan, resolve_memory


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
            plan.geometry, config, measured, context=context, chunk=chunk, dtype=plan.weight_words
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
            states=config.state.state_memory_fraction,
        )
    return replace(sizes, host_blocks=host_blocks(plan))


def host_blocks(plan: EnginePlan) -> int:
    """Return the blocks of the host tier of this rank. Raises ConfigError when it does not hold one."""
    page, ranks = plan.geometry.page_bytes, plan.mesh.parallel.size
    blocks = plan.offload.host_bytes // ranks // page
    if plan.offload.host_bytes and blocks < len(plan.geometry.groups):
        raise ConfigError(
            f"kv_offload_gb={plan.offload.host_bytes / GIB:g} for {ranks} rank{'s' * (ranks > 1)} does "
            f"not hold a KV block of {page / 2**20:.1f} MiB each: raise it."
        )
    return blocks

"""Refusals that need no weights, told before the weights are read: memory and folder of KV tiers, sizes of the cache,
ports, context.

The parts of the engine check the same again when they take what they need; this file asks whether they can. It changes
nothing: it makes no folder, and closes the ports again.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from quire.config.engine import EngineConfig, check_context
from quire.config.events import read_events_config
from quire.contracts.errors import ConfigError
from quire.kvnet.event_publisher import EventPublisher
from quire.kvnet.share_server import listener_at
from quire.kvstore.files import HEADER
from quire.kvstore.private_folder import check_private
from quire.plan.cuda_memory import DeviceMemory
from quire.plan.engine import EnginePlan, host_layers
from quire.plan.meetings import check
from quire.plan.memory import GIB, as_gib
from quire.plan.sharing import Place
from quire.plan.sizing import host_bytes, resolve_sizing, rounded_up


def check_early(plans: Sequence[EnginePlan], free_memory: int) -> None:
    """Raise a `UserError` for an engine that cannot be built, whatever its weights are.

    plans         of all ranks
    free_memory   bytes of this host that are free before the weights are loaded
    """
    plan = plans[0]
    check(plan.meetings)
    check_context(plan.config.model, plan.args.max_position_embeddings)
    if not plan.config.hosts.several:
        _check_memory(plans, free_memory)
    if plan.offload.folder:
        if plan.config.hosts.distributed_executor_backend != "ray":  # whose nodes have the folder
            check_folder(plan.offload.folder, shared=plan.offload.folder_shared)
        _check_folder_size(plans)
    _check_ports(plan.config, [plan.offload.sharing.of(rank).place for rank in range(plan.mesh.parallel.dp)])


def _check_memory(plans: Sequence[EnginePlan], free_memory: int) -> None:
    needed, weights = sum(map(host_bytes, plans)), sum(host_layers(plan).num_bytes for plan in plans)
    if needed + weights > free_memory and weights:
        tiers = f" beside {as_gib(needed)} for KV blocks" * bool(needed)
        raise ConfigError(
            f"cpu_offload_gb={plans[0].config.load.cpu_offload_gb:g}: {as_gib(weights)} of weights would lie in host "
            f"memory{tiers}, and this host has {as_gib(free_memory)} of free memory: lower cpu_offload_gb."
        )
    if needed > free_memory:
        raise ConfigError(
            f"kv_offload_gb={plans[0].offload.host_bytes / GIB:g}: this host has {free_memory / GIB:.1f} GiB of free "
            "memory, before any weights: lower kv_offload_gb."
        )
    cache = plans[0].config.cache
    on_cpu = plans[0].machine.device == "cpu"
    if on_cpu or cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None:
        for plan in plans:
            resolve_sizing(plan, free_memory if on_cpu else _empty(plan.machine.total_memory))


def _empty(total: int) -> DeviceMemory:
    """A GPU on which nothing is. The cache gets less once the weights are there."""
    return DeviceMemory(total=total, at_start=total, free=total, weights=0)


def check_folder(name: str, *, shared: bool) -> None:
    """Raise ConfigError for a folder of the disk tier that cannot be made, or in which this user cannot write.

    shared   other users may write into the folder
    """
    folder = Path(name).expanduser().absolute()
    known = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    why = ""
    if not known.is_dir():
        why = f"{known} is not a folder"
    elif not os.access(known, os.W_OK | os.X_OK):
        why = f"this user may not write in {known}"
    if why:
        raise ConfigError(f"kv_offload_dir={name!r} cannot be used: {why}. Name a folder in which this user may write.")
    if known == folder and not shared:
        check_private(folder)


def _check_folder_size(plans: Sequence[EnginePlan]) -> None:
    offload, page = plans[0].offload, max(plan.geometry.page_bytes for plan in plans)
    state = max(plan.geometry.state_bytes for plan in plans)
    needed = page + HEADER.size + (state + HEADER.size) * (state > 0)
    ranks = plans[0].mesh.parallel.replica
    if offload.folder_bytes // ranks < needed:
        raise ConfigError(
            f"kv_offload_dir_gb={offload.folder_bytes / GIB:.3g} does not hold a KV block of {as_gib(page)} "
            + f"and a checkpoint of {as_gib(state)} " * (state > 0)
            + f"of each rank: raise kv_offload_dir_gb to {rounded_up((needed + 1) * ranks / GIB)} or more."
        )


def _check_ports(config: EngineConfig, places: Sequence[Place | None]) -> None:
    for replica, place in enumerate(places):
        if place is not None:
            listener_at(place).close()
        if (settings := read_events_config(config)) is not None:
            EventPublisher(settings, replica).close()

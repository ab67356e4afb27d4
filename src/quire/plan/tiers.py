"""The tiers of KV blocks below the device, as options and vLLM's connectors ask for them. Never imports torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.engine import CacheConfig, EngineConfig
from quire.contracts.errors import ConfigError
from quire.plan.sharing import CONNECTOR, ROLES, SharePlan, resolve_share

GIB = 1 << 30
LMCACHE_GIB = 5.0  # LMCache's default for host memory
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1")
EXAMPLE = (
    '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
    '{"cpu_bytes_to_use": 8000000000}}'
)
SIZES = {"cpu_bytes_to_use": 1.0, "lmcache.max_local_cpu_size": GIB}  # key of a connector -> bytes of its unit
FOLDERS, FOLDER_SIZES = "lmcache.local_disk", "lmcache.max_local_disk_size"
IDLE = {
    "spec_name",
    "block_size",
    "eviction_policy",
    "lmcache.chunk_size",
    "lmcache.use_layerwise",
    "lmcache.save_decode_cache",
}
KEYS = (
    "kv_connector",
    "kv_role",
    "kv_connector_extra_config",
    "kv_load_failure_policy",
    "engine_id",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_port",
    "kv_buffer_device",
    "kv_buffer_size",
)  # the last 7 mean nothing here


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Tiers below the device.

    host_bytes      host memory of all ranks together; 0: there is no tier below the device
    write_through   every full block goes to host memory; else those that are about to be evicted
    folder          folder of the disk tier; "": there is none
    folder_bytes    most bytes of its files, of all ranks of a replica together
    folder_shared   True: other users may write into the folder
    sharing         blocks of other engines, and for them
    notes           lines for the user
    """

    host_bytes: int = 0
    write_through: bool = False
    folder: str = ""
    folder_bytes: int = 0
    folder_shared: bool = False
    sharing: SharePlan = SharePlan()
    notes: tuple[str, ...] = ()

    @property
    def outside(self) -> bool:
        """True when blocks go to files or to other engines, which must have the same weights."""
        return bool(self.folder or self.sharing.place is not None or self.sharing.peers)

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return "write_through" if self.write_through else "lazy"


def resolve_offload(config: EngineConfig) -> OffloadPlan:
    """Return the tiers that a configuration asks for. Raises ConfigError for options that contradict each other."""
    cache, notes = config.cache, tuple[str, ...]()
    if cache.kv_transfer_config and cache.kv_transfer_config.get("kv_connector") != CONNECTOR:
        cache, notes = _of_connector(cache, cache.kv_transfer_config)
    if not math.isfinite(cache.kv_offload_gb + cache.kv_offload_dir_gb):
        raise ConfigError(
            f"kv_offload_gb={cache.kv_offload_gb}, kv_offload_dir_gb={cache.kv_offload_dir_gb}: sizes "
            "have an end: give a number of GiB."
        )
    if cache.kv_offload_dir == "":
        raise ConfigError("kv_offload_dir='' names no folder: name one, or leave kv_offload_dir out.")
    if cache.kv_offload_dir is None and cache.kv_offload_dir_gb != CacheConfig.kv_offload_dir_gb:
        raise ConfigError(
            f"kv_offload_dir_gb={cache.kv_offload_dir_gb:g}: there are no files, because no folder is "
            "named: give kv_offload_dir, too."
        )
    if cache.kv_offload_dir is None and config.share.kv_offload_dir_shared:
        raise ConfigError("kv_offload_dir_shared: no folder is named: give kv_offload_dir, too.")
    sharing = resolve_share(config, cache.kv_offload_gb)
    write_through = sharing.sends or cache.kv_offload_policy == "write_through"  # blocks go during the prompt
    if cache.kv_offload_gb == 0:
        if config.share.kv_faults:
            raise ConfigError("kv_faults: there is no tier to plant faults in: set kv_offload_gb, too, such as 8.")
        if cache.kv_offload_dir is not None:
            raise ConfigError(
                f"kv_offload_dir={cache.kv_offload_dir!r}: blocks go to a disk through host memory, and "
                "kv_offload_gb is 0: set kv_offload_gb, too, such as 8."
            )
        if cache.kv_offload_policy != CacheConfig.kv_offload_policy:
            raise ConfigError(
                f"kv_offload_policy={cache.kv_offload_policy}: no block goes to host memory, because "
                "kv_offload_gb is 0: set kv_offload_gb, too, such as 8."
            )
        return OffloadPlan(notes=notes)
    if not cache.enable_prefix_caching:
        raise ConfigError(
            f"kv_offload_gb={cache.kv_offload_gb:g}: blocks are found again by the prefix cache, which "
            "is off: leave out enable_prefix_caching=False, or kv_offload_gb."
        )
    hosts = config.hosts
    if cache.kv_offload_dir is not None and (hosts.nnodes > 1 or hosts.distributed_executor_backend == "ray"):
        raise ConfigError(
            "kv_offload_dir with ranks on several hosts: the engine core must see the files of all "
            "ranks: leave out kv_offload_dir, or use one host and distributed_executor_backend=mp."
        )
    folder = cache.kv_offload_dir or ""
    return OffloadPlan(
        host_bytes=int(cache.kv_offload_gb * GIB),
        write_through=write_through,
        folder=folder,
        folder_bytes=int(cache.kv_offload_dir_gb * GIB) if folder else 0,
        folder_shared=config.share.kv_offload_dir_shared,
        notes=notes,
        sharing=sharing,
    )


def _of_connector(cache: CacheConfig, asked: Mapping[str, Any]) -> tuple[CacheConfig, tuple[str, ...]]:
    """Return the options that one of vLLM's connectors stands for, and a note about them."""
    name, extra = asked.get("kv_connector"), asked.get("kv_connector_extra_config") or {}
    if unknown := sorted(set(asked) - set(KEYS)):
        raise ConfigError(
            f"kv_transfer_config has {', '.join(unknown)}, which Quire does not know: use "
            f"{', '.join(KEYS[:3])}, as in {EXAMPLE}."
        )
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"kv_transfer_config: kv_connector_extra_config={extra!r}: must be a mapping, as in {EXAMPLE}."
        )
    if name not in CONNECTORS:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={name!r} is not implemented: use one of "
            f"{', '.join(CONNECTORS)} for host memory; for prefill-decode disaggregation over TCP use "
            f'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_producer"}} with --kv-share on prefill '
            'nodes, "kv_consumer" with --kv-peers on decode nodes.'
        )
    if (role := asked.get("kv_role", "kv_both")) not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r}: must be one of {', '.join(ROLES)}.")
    if cache.kv_offload_gb:
        raise ConfigError("kv_transfer_config and kv_offload_gb both size the host memory: leave one out.")
    if (policy := asked.get("kv_load_failure_policy", "recompute")) != "recompute":
        raise ConfigError(
            f"kv_transfer_config: kv_load_failure_policy={policy!r}: blocks that cannot be loaded are "
            "computed: use recompute, or leave it out."
        )
    extra = dict(extra)
    if extra.pop("lmcache.local_cpu", True) is not True:
        raise ConfigError(
            "kv_transfer_config: lmcache.local_cpu=False: blocks go to a disk through host memory: leave it out."
        )
    if not extra.pop("lazy_offload", True):
        cache = replace(cache, kv_offload_policy="write_through")
    sizes = {key: extra.pop(key) for key in SIZES if key in extra}
    folder, most = extra.pop(FOLDERS, None), extra.pop(FOLDER_SIZES, cache.kv_offload_dir_gb)
    if unknown := sorted(set(extra) - IDLE):
        raise ConfigError(
            f"kv_transfer_config: kv_connector_extra_config has {', '.join(unknown)}, which Quire does "
            f"not know: use {', '.join([*SIZES, FOLDERS, FOLDER_SIZES])}, as in {EXAMPLE}."
        )
    lmcache = name == "LMCacheConnectorV1"
    if not sizes and not lmcache:
        raise ConfigError(
            f"kv_transfer_config: {name} without cpu_bytes_to_use: say how much host memory, as in {EXAMPLE}."
        )
    numbers = [*sizes.values(), most]
    if any(isinstance(one, bool) or not isinstance(one, int | float) or one <= 0 for one in numbers):
        raise ConfigError(f"kv_transfer_config: sizes must be positive numbers, not {numbers}.")
    gib = sum(value * SIZES[key] for key, value in sizes.items()) / GIB or LMCACHE_GIB
    if folder is not None:
        cache = replace(cache, kv_offload_dir=str(folder).removeprefix("file://"), kv_offload_dir_gb=float(most))
    disk = f", --kv-offload-dir {cache.kv_offload_dir}" if cache.kv_offload_dir else ""
    return replace(cache, kv_offload_gb=gib), (
        f"{name} means --kv-offload-gb {gib:g}{disk} here: Quire's own tiers and files.",
    )

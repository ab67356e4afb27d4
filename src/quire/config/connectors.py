"""vLLM's KV connectors (`kv_transfer_config`), and the options of KV tiers that they stand for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.engine import CacheConfig
from quire.contracts.errors import ConfigError

GIB = 1 << 30
CONNECTOR = "QuireConnector"  # of prefill and decode nodes
ROLES = ("kv_both", "kv_producer", "kv_consumer")
LMCACHE_GIB = 5.0  # LMCache's default for host memory
MULTI = "MultiConnector"  # several connectors
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1")
EXAMPLE = (
    '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
    '{"cpu_bytes_to_use": 8000000000}}'
)
MULTI_EXAMPLE = (
    '{"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": '
    '[{"kv_connector": "QuireConnector"}, {"kv_connector": "LMCacheConnectorV1"}]}}'
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


def tier_options(cache: CacheConfig) -> tuple[CacheConfig, tuple[str, ...]]:
    """Return the options of tiers, with those that one of vLLM's connectors stands for, and notes about these.

    Raises ConfigError for a connector, a key or a value that does not exist.
    """
    tiers = [one for one in _connectors(cache) if one.get("kv_connector") != CONNECTOR]
    return _of_connector(cache, tiers[0]) if tiers else (cache, ())


def node_options(cache: CacheConfig) -> Mapping[str, Any]:
    """Return the connector of a prefill or decode node, as `kv_transfer_config` has it; {}: there is none."""
    return next((one for one in _connectors(cache) if one.get("kv_connector") == CONNECTOR), {})


def _connectors(cache: CacheConfig) -> list[Mapping[str, Any]]:
    """Return the connector that is asked for, or those of a MultiConnector: one for nodes, one for tiers at most."""
    asked = cache.kv_transfer_config
    if not asked:
        return []
    if asked.get("kv_connector") != MULTI:
        return [asked]
    extra = asked.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) and set(extra) == {"connectors"} else None
    if set(asked) - set(KEYS) or not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
        raise ConfigError(
            f"kv_transfer_config: {MULTI} has a list of connectors in kv_connector_extra_config and nothing else, as "
            f"in {MULTI_EXAMPLE}."
        )
    nodes = sum(one.get("kv_connector") == CONNECTOR for one in inner)
    if nodes > 1 or len(inner) - nodes > 1:
        names = ", ".join(str(one.get("kv_connector")) for one in inner)
        raise ConfigError(
            f"kv_transfer_config: {MULTI} of {names}: an engine has one host memory for KV blocks: name {CONNECTOR} "
            f"once and one of {', '.join(CONNECTORS)} once, at most."
        )
    role = {"kv_role": asked["kv_role"]} if "kv_role" in asked else {}
    return [{**role, **one} for one in inner]


def _of_connector(cache: CacheConfig, asked: Mapping[str, Any]) -> tuple[CacheConfig, tuple[str, ...]]:
    """Return the options that one of vLLM's connectors stands for, and notes about them. Options of Quire win."""
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
    own = cache.kv_offload_gb
    if not sizes and not lmcache and not own:
        raise ConfigError(
            f"kv_transfer_config: {name} without cpu_bytes_to_use: say how much host memory, as in {EXAMPLE}."
        )
    numbers = [*sizes.values(), most]
    if any(isinstance(one, bool) or not isinstance(one, int | float) or one <= 0 for one in numbers):
        raise ConfigError(f"kv_transfer_config: sizes must be positive numbers, not {numbers}.")
    gib = own or sum(value * SIZES[key] for key, value in sizes.items()) / GIB or LMCACHE_GIB
    idle = [*sizes] * bool(own)
    if folder is not None and cache.kv_offload_dir is not None:
        idle.append(FOLDERS)
    elif folder is not None:
        cache = replace(cache, kv_offload_dir=str(folder).removeprefix("file://"), kv_offload_dir_gb=float(most))
    disk = f", --kv-offload-dir {cache.kv_offload_dir}" if cache.kv_offload_dir else ""
    notes = [f"{name} means --kv-offload-gb {gib:g}{disk} here: Quire's own tiers and files."]
    if idle:
        notes.append(f"kv_transfer_config: {' and '.join(idle)} changes nothing beside options of Quire's own tiers.")
    return replace(cache, kv_offload_gb=gib), tuple(notes)

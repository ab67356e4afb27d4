"""The tiers of KV blocks below the device, as options and vLLM's connectors ask for them. Never imports torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.engine import CacheConfig, EngineConfig
from quire.config.placement import parallel_sizes
from quire.contracts.errors import ConfigError
from quire.contracts.transfer import TransferRole

GIB = 1 << 30
LMCACHE_GIB = 5.0  # LMCache's default for host memory
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1")
EXAMPLE = ('{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
           '{"cpu_bytes_to_use": 8000000000}}')
SIZES = {"cpu_bytes_to_use": 1.0, "lmcache.max_local_cpu_size": GIB}  # key of a connector -> bytes of its unit
FOLDERS, FOLDER_SIZES = "lmcache.local_disk", "lmcache.max_local_disk_size"
IDLE = {"spec_name", "block_size", "eviction_policy", "lazy_offload", "lmcache.local_cpu", "lmcache.chunk_size",
        "lmcache.use_layerwise", "lmcache.save_decode_cache"}  # fmt: skip
CONNECTOR = "QuireConnector"  # prefill and decode nodes
ROLES = ("kv_both", "kv_producer", "kv_consumer")


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Tiers below the device.

    host_bytes      host memory of all ranks together; 0: there is no tier below the device
    write_through   every full block goes to host memory; else those that are about to be evicted
    folder          folder of the disk tier; "": there is none
    folder_bytes    most bytes of its files, of all ranks of a replica together
    share           host and port on which other engines read the blocks in host memory; None: nowhere
    peers           hosts and ports of the engines whose blocks this one reads
    sends, takes    it computes prompts for other engines; it goes on with prompts that others have computed
    notes           lines for the user
    """

    host_bytes: int = 0
    write_through: bool = False
    folder: str = ""
    folder_bytes: int = 0
    share: tuple[str, int] | None = None
    peers: tuple[tuple[str, int], ...] = ()
    sends: bool = False
    takes: bool = False
    notes: tuple[str, ...] = ()

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return "write_through" if self.write_through else "lazy"

    def role(self, block_size: int) -> TransferRole:
        """Return the part of the engine in prefill-decode disaggregation."""
        address = "" if self.share is None else f"{self.share[0]}:{self.share[1]}"
        return TransferRole(sends=self.sends, takes=self.takes, address=address, block_size=block_size)


def resolve_offload(config: EngineConfig) -> OffloadPlan:
    """Return the tiers that a configuration asks for. Raises ConfigError for options that contradict each other."""
    cache, notes = config.cache, tuple[str, ...]()
    sends, takes = _roles(config)
    if cache.kv_transfer_config and not (sends or takes):
        cache, notes = _of_connector(cache, cache.kv_transfer_config)
    if not math.isfinite(cache.kv_offload_gb + cache.kv_offload_dir_gb):
        raise ConfigError(f"kv_offload_gb={cache.kv_offload_gb}, kv_offload_dir_gb={cache.kv_offload_dir_gb}: sizes "
                          "have an end: give a number of GiB.")
    share, peers = _sharing(config, cache)
    write_through = sends or cache.kv_offload_policy == "write_through"  # blocks go while the prompt is computed
    if cache.kv_offload_gb == 0:
        if cache.kv_offload_dir is not None:
            raise ConfigError(f"kv_offload_dir={cache.kv_offload_dir!r}: blocks go to a disk through host memory, and "
                              "kv_offload_gb is 0: set kv_offload_gb, too, such as 8.")
        return OffloadPlan(notes=notes)
    if not cache.enable_prefix_caching:
        raise ConfigError(f"kv_offload_gb={cache.kv_offload_gb:g}: blocks are found again by the prefix cache, which "
                          "is off: leave out enable_prefix_caching=False, or kv_offload_gb.")
    hosts = config.hosts
    if cache.kv_offload_dir is not None and (hosts.nnodes > 1 or hosts.distributed_executor_backend == "ray"):
        raise ConfigError("kv_offload_dir with ranks on several hosts: the engine core must see the files of all "
                          "ranks: leave out kv_offload_dir, or use one host and distributed_executor_backend=mp.")
    folder = cache.kv_offload_dir or ""
    return OffloadPlan(
        host_bytes=int(cache.kv_offload_gb * GIB), write_through=write_through,
        folder=folder, folder_bytes=int(cache.kv_offload_dir_gb * GIB) if folder else 0, notes=notes, share=share,
        peers=peers, sends=sends, takes=takes,
    )  # fmt: skip


def _roles(config: EngineConfig) -> tuple[bool, bool]:
    """Return the part of the engine in disaggregation: it computes prompts for others; it takes those of others."""
    asked, share = config.cache.kv_transfer_config or {}, config.share
    if asked.get("kv_connector") != CONNECTOR:
        return False, False
    if (role := asked.get("kv_role")) not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r}: must be one of {', '.join(ROLES)}.")
    if unknown := sorted(set(asked) - {"kv_connector", "kv_role"}):
        raise ConfigError(f"kv_transfer_config: {CONNECTOR} has no {', '.join(unknown)}: --kv-share, --kv-peers and "
                          "--kv-offload-gb say where blocks are.")
    sends, takes = role != "kv_consumer", role != "kv_producer"
    missing = ["kv_share"] * (sends and not share.kv_share) + ["kv_peers"] * (takes and not share.kv_peers)
    if missing:
        raise ConfigError(f"kv_transfer_config: kv_role={role} without {' and '.join(missing)}: a prefill node shares "
                          "its blocks (--kv-share HOST:PORT), a decode node reads those of prefill nodes (--kv-peers).")
    return sends, takes


def _sharing(config: EngineConfig, cache: CacheConfig) -> tuple[tuple[str, int] | None, tuple[tuple[str, int], ...]]:
    """Return the address on which blocks are shared, and those of the peers."""
    asked = config.share
    if asked.kv_share is None and not asked.kv_peers:
        return None, ()
    name = "kv_share" if asked.kv_share else "kv_peers"
    if cache.kv_offload_gb == 0:
        raise ConfigError(f"{name}: engines read each other's blocks through host memory, and kv_offload_gb is 0: set "
                          "kv_offload_gb, too, such as 8.")
    if parallel_sizes(config.parallel).size > 1:
        raise ConfigError(f"{name} is not implemented for an engine of several ranks: leave out -tp, -pp and -dp, or "
                          f"{name}.")
    share = None if asked.kv_share is None else _place(asked.kv_share, "kv_share")
    return share, tuple(_place(peer, "kv_peers") for some in asked.kv_peers for peer in some.split(","))


def _place(text: str, option: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; the host is loopback if only a port is given."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{option}={text!r}: give a host and a port, such as 127.0.0.1:5700.")
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"{option}={text!r}: other engines cannot connect to this address. Give the address by which "
                          "they reach this host.")
    return host, int(port)


def _of_connector(cache: CacheConfig, asked: Mapping[str, Any]) -> tuple[CacheConfig, tuple[str, ...]]:
    """Return the options that one of vLLM's connectors stands for, and a note about them."""
    name, extra = asked.get("kv_connector"), dict(asked.get("kv_connector_extra_config") or {})
    if name not in CONNECTORS:
        raise ConfigError(f"kv_transfer_config: kv_connector={name!r} is not implemented: use one of "
                          f"{', '.join(CONNECTORS)} for host memory; for prefill-decode disaggregation over TCP use "
                          f'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_producer"}} with --kv-share on prefill '
                          'nodes, "kv_consumer" with --kv-peers on decode nodes.')
    if (role := asked.get("kv_role", "kv_both")) not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r}: must be one of {', '.join(ROLES)}.")
    if cache.kv_offload_gb:
        raise ConfigError("kv_transfer_config and kv_offload_gb both size the host memory: leave one out.")
    sizes = {key: extra.pop(key) for key in SIZES if key in extra}
    folder, most = extra.pop(FOLDERS, None), extra.pop(FOLDER_SIZES, cache.kv_offload_dir_gb)
    if unknown := sorted(set(extra) - IDLE):
        raise ConfigError(f"kv_transfer_config: kv_connector_extra_config has {', '.join(unknown)}, which Quire does "
                          f"not know: use {', '.join([*SIZES, FOLDERS, FOLDER_SIZES])}, as in {EXAMPLE}.")
    lmcache = name == "LMCacheConnectorV1"
    if not sizes and not lmcache:
        raise ConfigError(f"kv_transfer_config: {name} without cpu_bytes_to_use: say how much host memory, as in "
                          f"{EXAMPLE}.")
    numbers = [*sizes.values(), most]
    if any(isinstance(one, bool) or not isinstance(one, int | float) or one <= 0 for one in numbers):
        raise ConfigError(f"kv_transfer_config: sizes must be positive numbers, not {numbers}.")
    gib = sum(value * SIZES[key] for key, value in sizes.items()) / GIB or LMCACHE_GIB
    if folder is not None:
        cache = replace(cache, kv_offload_dir=str(folder).removeprefix("file://"), kv_offload_dir_gb=float(most))
    disk = f", --kv-offload-dir {cache.kv_offload_dir}" if cache.kv_offload_dir else ""
    return replace(cache, kv_offload_gb=gib), (f"{name} means --kv-offload-gb {gib:g}{disk} here: Quire's own tiers "
                                               "and files.",)

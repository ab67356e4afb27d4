"""The tiers of KV blocks below the device, as options and vLLM's connectors ask for them. Never imports torch."""

import math
from dataclasses import dataclass

from quire.config.connectors import tier_options
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.plan.sharing import SharePlan, resolve_share

GIB = 1 << 30


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
    """Return the tiers that a configuration asks for. Raises ConfigError for wrong names and values.

    Options that contradict each other are rows of `plan/meetings.py`.
    """
    cache, notes = tier_options(config.cache)
    if not math.isfinite(cache.kv_offload_gb + cache.kv_offload_dir_gb):
        raise ConfigError(
            f"kv_offload_gb={cache.kv_offload_gb}, kv_offload_dir_gb={cache.kv_offload_dir_gb}: sizes "
            "have an end: give a number of GiB."
        )
    if cache.kv_offload_dir == "":
        raise ConfigError("kv_offload_dir='' names no folder: name one, or leave kv_offload_dir out.")
    sharing = resolve_share(config)
    if cache.kv_offload_gb == 0:
        return OffloadPlan(notes=notes)
    folder = cache.kv_offload_dir or ""
    return OffloadPlan(
        host_bytes=int(cache.kv_offload_gb * GIB),
        write_through=sharing.sends or cache.kv_offload_policy == "write_through",  # blocks go during the prompt
        folder=folder,
        folder_bytes=int(cache.kv_offload_dir_gb * GIB) if folder else 0,
        folder_shared=config.share.kv_offload_dir_shared,
        notes=notes,
        sharing=sharing,
    )

"""`Parts` of an engine, which the assembly for a device returns to `assemble`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.contracts.protocols import Executor, ExecutorFacts
from quire.contracts.step import FileNews
from quire.kvstore.shards import Shard
from quire.layers.stack import Model
from quire.plan.cuda_memory import DeviceMemory
from quire.plan.engine import EnginePlan
from quire.plan.memory import MemoryPlan
from quire.weights.cache_scales import Scales, read_scales
from quire.weights.files import read_checkpoint
from quire.worker.runner import StepRunner

Loading = Callable[[int, int], None]  # (bytes done, bytes in all)


class Outside(msgspec.Struct, frozen=True):
    """Facts about KV blocks outside of the engine, for a rank.

    namespace   of blocks in files and on other engines, see `namespace` of `offload.py`
    address     of the rank's host, if the engine core is on another one, and sees neither the files of the rank nor its
                memory; "": the core is on this host
    """

    namespace: bytes = b""
    address: str = ""


class RankTiers(NamedTuple):
    """The tiers of KV blocks below the device of a rank, or of the ranks of a replica.

    shards   parts of blocks that other engines may read, of each rank
    files    first news of each rank whose files the engine core cannot see
    close    waits until files are deleted, some seconds at most
    """

    shards: tuple[Shard, ...] = ()
    files: tuple[FileNews, ...] = ()
    close: Callable[[], object] = tuple


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model on its device, its model runner and its executor.

    plan           the plan from which the model was built
    model, worker  the model and its model runner; None in a process that only starts the processes of ranks
    memory         size of this rank's KV cache, and the context length
    executor       makes the executor from `ExecutorFacts`
    depth, prompt_chunk, num_stages   see `ExecutorFacts`
    plans          choices that were made, by name, for display
    notes          lines that the user should see
    hosts          index of the host of each rank; (): one rank
    tiers          tiers of KV blocks below the device
    namespace      of KV blocks in files and on other engines
    """

    plan: EnginePlan
    model: Model | None
    worker: StepRunner | None
    executor: Callable[[ExecutorFacts], Executor]
    depth: int
    memory: MemoryPlan
    prompt_chunk: int = 0
    num_stages: int = 1
    plans: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    tiers: RankTiers = RankTiers()
    namespace: bytes = b""


@dataclass(frozen=True)
class Loaded:
    """A rank's model on its device, with its weights, before the KV cache is sized.

    measure   measures the memory of the device, for `resolve_sizing`
    finish    makes the KV cache, the tiers below it and the model runner, with the sizes that `resolve_sizing` returns
    sums      what was read, for `namespace` of `offload.py`; b"": no block leaves the engine
    """

    measure: Callable[[], DeviceMemory | int]
    finish: Callable[[MemoryPlan, Outside], Parts]
    sums: bytes = b""


class Filled(NamedTuple):
    """A report of the loading of a model, in one line, and the sums of what was read."""

    words: str
    sums: bytes


def cache_scales(plan: EnginePlan) -> list[Scales]:
    """Return each layer's scales of keys and values for an 8-bit KV cache, from the checkpoint; [] = all are 1.

    Raises WeightsError for scales that cannot be used.
    """
    if not plan.cache.scaled or plan.config.load.load_format == "dummy":
        return []
    return read_scales(read_checkpoint(Path(plan.folder)), plan.args)


def cache_words(plan: EnginePlan, scales: list[Scales]) -> str:
    """Describe the dtype of the KV cache and its scales; "" for a cache in the dtype in which the model computes."""
    if not plan.cache.features:
        return ""
    return f"{plan.cache.dtype} ({plan.cache.reason}; {'scales of the checkpoint' if scales else 'all scales are 1'})"

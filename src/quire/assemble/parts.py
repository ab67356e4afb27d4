"""`Parts` of an engine, which the assembly for a device returns to `assemble`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quire.config.resolve import MemoryPlan
from quire.config.resolve_cuda import DeviceMemory
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.layers.stack import Model
from quire.models.plan import EnginePlan
from quire.weights.cache_scales import Scales, read_scales
from quire.weights.files import read_checkpoint
from quire.worker.runner import StepRunner

Loading = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model on its device, its worker and its executor.

    plan           the plan from which the model was built
    model, worker  of an engine on one device, or of a rank in its process; None in the process that starts ranks
    memory         sizes, for the geometry of this rank;  num_stages   of the pipeline
    executor       makes the executor, once the facts are known;  depth  steps in its queue
    prompt_chunk   see `ExecutorFacts`
    hardware       the device, if there is more to say than its name
    plans          printable values;  notes  lines that the user should see
    """

    plan: EnginePlan
    model: Model | None
    worker: StepRunner | None
    executor: Callable[[ExecutorFacts], Executor]
    depth: int
    memory: MemoryPlan
    prompt_chunk: int = 0
    num_stages: int = 1
    hardware: str = ""
    plans: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A rank's model on its device, with its weights, before the KV cache is sized.

    measure   returns the memory of the device, as `resolve_sizing` takes it
    finish    builds the rest with the given sizes
    """

    measure: Callable[[], DeviceMemory | int]
    finish: Callable[[MemoryPlan], Parts]


def cache_scales(plan: EnginePlan) -> list[Scales]:
    """Return each layer's scales of keys and values for an 8-bit KV cache, from the checkpoint; [] = all are 1.

    Raises WeightsError for scales that cannot be used.
    """
    if not plan.cache.scaled or plan.config.load.load_format == "dummy":
        return []
    return read_scales(read_checkpoint(Path(plan.folder)), plan.args)


def cache_words(plan: EnginePlan, scales: list[Scales]) -> str:
    """Describe the type of the KV cache and its scales; "" for a cache in the type of the computation."""
    if not plan.cache.features:
        return ""
    return f"{plan.cache.dtype} ({plan.cache.reason}; {'scales of the checkpoint' if scales else 'all scales are 1'})"

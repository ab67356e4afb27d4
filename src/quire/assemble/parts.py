"""`Parts` of an engine, which the assembly for a device returns to `assemble`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.config.resolve import MemoryPlan
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.layers.stack import Model
from quire.models.plan import EnginePlan
from quire.worker.runner import StepRunner

Loading = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model on its device, its worker and its executor.

    plan           the plan from which the model was built
    executor       makes the executor, once the facts are known;  depth  steps in its queue
    prompt_chunk   see `ExecutorFacts`
    hardware       the device, if there is more to say than its name
    plans          printable values;  notes  lines that the user should see
    """

    plan: EnginePlan
    model: Model
    worker: StepRunner
    executor: Callable[[ExecutorFacts], Executor]
    depth: int
    memory: MemoryPlan
    prompt_chunk: int = 0
    hardware: str = ""
    plans: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

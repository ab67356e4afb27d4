"""Assembly of the states of recurrent layers: their memory, what a step does with them, and their checkpoints."""

from typing import TYPE_CHECKING

from quire.config.checkpoints import read_places
from quire.kv.states import StateCheckpoints
from quire.plan.engine import EnginePlan
from quire.plan.memory import MemoryPlan

if TYPE_CHECKING:
    from quire.kvstore.states import StateArena
    from quire.worker.runner import StepRunner


def make_checkpoints(memory: MemoryPlan, plan: EnginePlan) -> StateCheckpoints | None:
    """Return the checkpoints of an engine core; None: no layer keeps states."""
    if not memory.checkpoints:
        return None
    places, unit, draft = read_places(plan.config.state.state_checkpoint), memory.geometry.hit_size, plan.draft
    behind = plan.drafting.num_drafts if draft is not None and draft.args.keeps_states else 0
    return StateCheckpoints(memory.checkpoints, unit, places.in_answers(unit), behind, places)


def keep_states(worker: "StepRunner", states: "StateArena") -> None:
    """Let a runner tell its layers where states are, if any layer keeps some."""
    from quire.worker.states import RequestStates

    if states.rows.shape[1]:
        worker.features.attach(RequestStates(states.rows, worker.limits.num_slots, worker.step, worker.state.buffers))

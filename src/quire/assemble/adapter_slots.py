"""Assembly of the slots of adapters of an engine core."""

from pathlib import Path

from quire.adapters.slots import AdapterRules, adapter_rules
from quire.contracts.adapters import Adapter
from quire.engine.adapters import AdapterSlots
from quire.plan.engine import EnginePlan
from quire.weights.adapter_files import read_adapter


def adapter_slots(plan: EnginePlan) -> AdapterSlots | None:
    """Return the slots of adapters of an engine core; None: requests cannot name one."""
    config = plan.config.adapters
    if not config.enable_lora:
        return None
    found: list[AdapterRules] = []  # made at the first use: they take all names of the model

    def check(adapter: Adapter) -> None:
        if not found:
            found.append(adapter_rules(plan.args, config))
        found[0].check(read_adapter(Path(adapter.folder)))

    return AdapterSlots(config.num_slots, config.num_held, check)

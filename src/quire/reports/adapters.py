"""The adapters (LoRA) that an engine serves, as plain values: slots, and the memory that they take on a rank."""

from typing import Any

from quire.adapters.slots import last_name, slot_plan
from quire.plan.engine import EnginePlan
from quire.plan.weight_bytes import ITEM_BYTES


def adapter_bytes(plan: EnginePlan) -> int:
    """Return the bytes of all slots on the rank of a plan; 0: its engine serves no adapters."""
    slots = slot_plan(plan)
    return 0 if slots is None else plan.config.adapters.num_slots * slots.num_bytes(ITEM_BYTES[plan.dtype.dtype])


def describe_adapters(plan: EnginePlan) -> dict[str, Any] | None:
    """Return the slots of a rank as plain values; None without adapters.

    `slot_bytes` is an adapter's memory on the device, whatever its rank; `modules` has the linear layers' last names;
    `linears` counts the two of each routed expert.
    """
    slots, config = slot_plan(plan), plan.config.adapters
    if slots is None:
        return None
    tails = {last_name(module.tail) for linear in slots.linears for module in linear.modules}
    return {
        "slots": config.num_slots,
        "held": config.num_held,
        "rank": config.max_lora_rank,
        "slot_bytes": slots.num_bytes(ITEM_BYTES[plan.dtype.dtype]),
        "bytes": adapter_bytes(plan),
        "linears": len(slots.linears),
        "modules": sorted(tails),
    }

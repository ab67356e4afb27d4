"""The states of recurrent layers in a plan, as plain values and in words. No torch."""

from collections.abc import Mapping
from typing import Any

from quire.config.checkpoints import read_places
from quire.plan.engine import EnginePlan
from quire.plan.memory import MemoryPlan, as_gib
from quire.plan.sizing import use_of
from quire.plan.state_memory import enough, num_places

SLACK = 0.02  # of the share of states: blocks and states are whole


def describe_states(plan: EnginePlan, memory: MemoryPlan) -> dict[str, Any]:
    """Return the states that layers of a rank keep of requests, as plain values; {}: no layer keeps some.

    bytes         of a running request, and of a checkpoint
    dtype         of the matrices of heads; "": no layer keeps some
    tokens        tokens whose KV takes as much in the layers of full attention; 0: there are no such layers
    slots         requests that run at once
    checkpoints   copies of states, for later requests
    num_bytes     of slots and checkpoints together, with the slot of rows of padding
    fraction      their share of the memory that they have with the KV cache
    places        see `CheckpointPlaces`, with `every` in whole KV blocks
    """
    geometry = memory.geometry
    if not geometry.states:
        return {}
    size, slots = geometry.state_bytes, memory.num_slots or plan.config.scheduler.sequences()
    per_token = sum(one.page_bytes / one.block_size for one in geometry.groups if one.window is None)
    whole = (slots + 1 + memory.checkpoints) * size
    return {
        "bytes": size,
        "dtype": next((one.dtype for part in geometry.states for one in part.components if one.name == "matrix"), ""),
        "tokens": round(size / per_token) if per_token else 0,
        "slots": slots,
        "checkpoints": memory.checkpoints,
        "num_bytes": whole,
        "fraction": round(whole / (whole + memory.kv_bytes), 3),
        "places": str(read_places(plan.config.state.state_checkpoint).on_blocks(geometry.hit_size)),
    }


def state_notes(plan: EnginePlan, memory: MemoryPlan) -> tuple[str, ...]:
    """Return lines for the user: checkpoints are too few, or states have less memory than was asked for."""
    found, use = describe_states(plan, memory), use_of(plan)
    if not found:
        return ()
    notes, slots, checkpoints = list[str](), found["slots"], memory.checkpoints
    if use.per_slot and checkpoints < enough(slots):
        notes.append(
            f"{checkpoints:,} checkpoint{'s' * (checkpoints > 1)} of states for {slots:,} request{'s' * (slots > 1)} "
            "at once: each may hold one, so that prompts of others leave none. Lower max_num_seqs, or raise "
            "state_memory_fraction."
        )
    if use.fraction is not None and found["fraction"] < use.fraction - SLACK:
        places = num_places(memory.geometry, memory.kv_bytes)
        if use.per_slot == 0:
            why = "no checkpoints are taken"
        elif use.per_slot == 1 and checkpoints >= enough(slots):
            why = f"{slots:,} running requests alone use checkpoints"
        elif checkpoints >= places:
            why = f"the KV cache has {places:,} places for checkpoints: enlarge it"
        else:
            why = "free memory, or another rank, has room for no more"
        notes.append(
            f"states have {found['fraction']:.1%} of the memory of states and KV cache, not "
            f"state_memory_fraction={use.fraction:g}: {why}."
        )
    return tuple(notes)


def state_words(states: Mapping[str, Any]) -> str:
    """Return what `describe_states` has found, in a line; "" for nothing."""
    if not states:
        return ""
    size = as_gib(states["bytes"])
    dtype = f", with matrices in {states['dtype']}" * bool(states["dtype"])
    tokens = f" (as much as the KV of {states['tokens']:,} tokens)" * bool(states["tokens"])
    slots, checkpoints = states["slots"], states["checkpoints"]
    return (
        f"{size} for each request and checkpoint{tokens}{dtype}, {slots:,} request{'s' * (slots > 1)} at once and "
        f"{checkpoints:,} checkpoint{'s' * (checkpoints > 1)} ({states['places']}) in {as_gib(states['num_bytes'])}, "
        f"{states['fraction']:.1%} of states and KV cache"
    )

"""Lines about the features of an engine that options turn on, or leave off: drafts, tiers of KV blocks, sharing."""

from collections.abc import Mapping

from quire.adapters.slots import slot_plan
from quire.config.connectors import node_options
from quire.config.events import read_events_config
from quire.contracts.step import Tier
from quire.kv.store import KVStore
from quire.plan.engine import EnginePlan, host_layers
from quire.plan.memory import GIB, MemoryPlan
from quire.plan.sharing import Place
from quire.plan.weight_bytes import ITEM_BYTES
from quire.procs.messages import FEATURES
from quire.reports.states import describe_states, state_words

OFF = "off"  # with the option that turns it on


def turned_on(plan: EnginePlan, store: KVStore | None, memory: MemoryPlan) -> dict[str, str]:
    """Return the lines by their titles. Drafts and tiers have one also when they are off, so that a forgotten flag is
    seen. `store`: of the first replica; None: there is no tier below the device."""
    return {
        "states": state_words(describe_states(plan, memory)),
        "drafts": str(plan.speculation or f"{OFF} (--speculative-config)"),
        "KV tiers": f"{OFF} (--kv-offload-gb)" if store is None else _tiers(plan, store),
        "sharing": "; ".join(_sharing(plan)),
        "adapters": _adapters(plan),
        "host weights": _host_weights(plan),
    }


def _host_weights(plan: EnginePlan) -> str:
    """Return the layers whose weights lie in host memory, and their bytes; "" without."""
    host = host_layers(plan)
    layers = f"{len(host.layers)} of {len(range(*plan.mesh.rank.layers))} layers"
    return (
        f"{layers}, {host.num_bytes / GIB:.2f} GiB, through {host.slot_bytes / GIB:.2f} GiB of the device"
        if host.layers
        else ""
    )


def _adapters(plan: EnginePlan) -> str:
    """Return the number and size of the slots of adapters; "" without."""
    config, slots = plan.config.adapters, slot_plan(plan)
    if slots is None:
        return ""
    size = slots.num_bytes(ITEM_BYTES[plan.dtype.dtype])
    return (
        f"{config.num_slots} on the device, {size / 2**20:,.1f} MiB each on a rank (to rank {config.max_lora_rank}), "
        f"{config.num_held} in host memory"
    )


def _tiers(plan: EnginePlan, store: KVStore) -> str:
    offload, host = plan.offload, store.stats[Tier.HOST]
    states = f" and {store.states.host.num_blocks:,} checkpoints" if store.states is not None else ""
    words = [f"host memory {offload.host_bytes / GIB:g} GiB = {host.num_blocks:,} blocks{states} ({offload.policy})"]
    if offload.folder:
        found = f"{store.num_found:,} block{'s' * (store.num_found != 1)} found there"
        words.append(f"disk {offload.folder}, at most {offload.folder_bytes / GIB:g} GiB, {found}")
    return "; ".join(words)


def _sharing(plan: EnginePlan) -> list[str]:
    """Return what the engine has in common with others: its role, where it is read, its peers, its events."""
    sharing, events = plan.offload.sharing, read_events_config(plan.config)
    roles = {(True, True): "prefill and decode", (True, False): "prefill", (False, True): "decode"}
    role = roles.get((sharing.sends, sharing.takes))
    words = [f"role {role} ({node_options(plan.config.cache).get('kv_role')})"] if role else []
    if sharing.place is not None:
        first = sharing.place[1] + sharing.replicas
        there = f" (rank i of another host: there, at port {first} + i)" * plan.config.hosts.several
        words.append(f"read by others at {_address(sharing.place)}{there}")
    if sharing.peers:
        words.append(f"reads {', '.join(map(_address, sharing.peers))}")
    if events is not None:
        replay = f", replay {events.replay_endpoint}" if events.replay_endpoint else ""
        words.append(f"KV events to {events.endpoint}{replay}")
    return words


def _address(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def feature_lines(plans: Mapping[str, object]) -> tuple[str, ...]:
    """Return the lines about ranks and about features that are on, for an engine without a banner."""
    ranks = ["{ranks} ({each rank}).".format(**plans)] if plans.get("ranks") else []
    on = [title for title in ("states", *FEATURES) if plans[title] and not str(plans[title]).startswith(OFF)]
    return (*ranks, *(f"{title}: {plans[title]}." for title in on))

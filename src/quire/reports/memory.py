"""The memory of a plan as plain values: weights, buffers, KV cache, tiers below the device. No torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.parallel import Rank
from quire.contracts.params import Param, first_expert
from quire.plan.engine import EnginePlan, of_rank
from quire.plan.graphs import GraphPlan
from quire.plan.memory import MemoryPlan
from quire.plan.state_memory import divide_tier
from quire.plan.weight_bytes import ITEM_BYTES
from quire.quantization.formats import FORMATS
from quire.reports.states import describe_states, state_notes
from quire.weights.units import LoadUnit


def describe_memory(
    whole: EnginePlan,
    plan: MemoryPlan | str,
    rank: Rank,
    cache: KVGeometry,
    *,
    weights: int,
    scales: Sequence[tuple[str, str]],
    loading: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the memory of the rank with the least room as plain values.

    plan      memory of this rank, or the reason why no KV cache fits
    cache     pages of this rank
    weights   bytes of its parameters as they are kept
    scales    scales of an 8-bit cache: (tensor, reason)
    loading   as of `describe_loading`
    """
    page, size, group = cache.page_bytes, cache.block_size, max(cache.groups, key=lambda one: one.page_bytes)
    drafting = next((one for one in cache.groups if one.num_drafts), group)
    full = [one for one in cache.groups if one.window is None]
    known = {
        "rank": rank.number,
        "weights": weights,
        "buffers": of_rank(whole, rank).buffer_bytes,
        "kv_bytes_per_token": sum(one.page_bytes / one.block_size for one in full),
        "block_size": size,
        "block_bytes": page // max(1, len(group.layers)),
        "page_bytes": page,
        "page_layers": len(group.layers),
        "full_layers": sum(len(one.layers) for one in full),
        "groups": _groups(cache),
        "windows": [[count, window] for window, count in Counter(cache.windows).items() if window is not None],
        "components": _components(group.components),
        "draft_layers": drafting.num_drafts,
        "draft_components": _components(drafting.drafts),
        "cache_reason": whole.cache.reason,
        "cache_scales": scales,
        "widened_tokens": whole.widened_tokens,
        "scratch": whole.scratch_bytes,
        "loading": loading,
    }
    return known | (
        {"refused": plan}
        if isinstance(plan, str)
        else {
            "num_blocks": plan.num_blocks,
            "kv_bytes": plan.kv_bytes,
            "num_tokens": plan.num_tokens,
            "max_model_len": plan.max_model_len,
            "notes": (*plan.notes, *state_notes(whole, plan)),
            "graphs": graph_words(whole.graphs),
            "sequences": whole.config.scheduler.sequences(),
            "states": describe_states(whole, plan),
            "tiers": _tiers(whole, plan),
            "full_sequences": round(plan.num_tokens / plan.max_model_len, 2),
            "budget": str(plan.budget or ""),
        }
    )


def graph_words(graphs: GraphPlan) -> str:
    """Return the sizes of the steps that are captured as CUDA graphs, in words; "": none."""
    drafts = f", also with {' or '.join(map(str, graphs.drafts))} drafts each" * bool(graphs.drafts)
    drafts += ", of one size on all replicas: that of the fullest" * graphs.even
    parts = (
        (graphs.sequences, f"decodes of {_runs(graphs.sequences)} requests ({len(graphs.sequences)} sizes){drafts}"),
        (graphs.tokens, f"prompts of {_runs(graphs.tokens)} tokens ({len(graphs.tokens)} sizes)"),
    )
    return "; ".join(words for sizes, words in parts if sizes)


def _runs(sizes: Sequence[int]) -> str:
    """Return ascending numbers with those at equal distances as one: "1, 2, 4, 8 to 64 by 8"."""
    runs = list[list[int]]()
    for size in sizes:
        if runs and (len(runs[-1]) < 2 or size - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(
        f"{run[0]:,} to {run[-1]:,} by {run[1] - run[0]:,}" if len(run) > 2 else ", ".join(f"{one:,}" for one in run)
        for run in runs
    )


def _groups(cache: KVGeometry) -> list[dict[str, Any]]:
    """Return the KV groups as plain values, those that are alike together."""
    alike = dict[object, list[KVGroup]]()
    for group in cache.groups:
        alike.setdefault((group.window, group.block_size, group.components), []).append(group)
    return [
        {
            "count": len(own),
            "layers": max(len(one.layers) for one in own),
            "window": own[0].window,
            "block_size": own[0].block_size,
            "bytes": max(one.page_bytes for one in own),
            "components": _components(own[0].components),
        }
        for own in alike.values()
    ]


def _components(parts: Iterable[KVComponent]) -> list[list[Any]]:
    """Return components as [name, heads, head size, dtype]."""
    return [[one.name, one.num_heads, one.head_dim, one.dtype] for one in parts]


def describe_loading(
    plan: EnginePlan,
    params: Iterable[Param],
    weights: int,
    *,
    device: str,
    num_bytes: Callable[[Param], int],
    in_place: Callable[[str], bool],
) -> dict[str, Any]:
    """Return the most bytes that loading takes on the device that loads, and the parts of them.

    params     parameters of the rank, in the order of the layers, with at least one expert
    weights    bytes of the rank's parameters as they are kept
    num_bytes  returns the bytes of a parameter as it is kept
    in_place   returns True for the name of experts that are loaded into the memory where they are kept

    units    two of the largest units in the types in which they are loaded; see `quire.weights.load`
    packed   the largest matrix, or vector, that is packed beside them
    """
    item, units, packed, seen = ITEM_BYTES[plan.dtype.dtype], 0, 0, set[object]()
    for module, group in groupby(params, key=lambda param: param.module):
        own = list(group)
        alike = tuple((param.shape, param.format, param.stored, param.scheme, param.dtype) for param in own)
        if alike in seen or own[0].shard == "experts" and in_place(own[0].name):
            continue
        seen.add(alike)
        one = list(map(first_expert, own))
        raws = [raw for param in one for raw in FORMATS[param.format].tensors(param)]
        units = max(units, 2 * LoadUnit(module, 0, tuple(raws)).num_bytes(item))
        packed = max(packed, *map(num_bytes, one))
    return {
        "device": device,
        "units": units,
        "packed": packed,
        "bytes": units + packed + weights * (device == plan.machine.device),
    }


def _tiers(whole: EnginePlan, memory: MemoryPlan) -> list[dict[str, Any]]:
    """Return the tiers of KV blocks below the device, the nearest first; [] for none."""
    offload, page, state = whole.offload, memory.geometry.page_bytes, memory.geometry.state_bytes
    if not offload.host_bytes:
        return []
    host = {
        "name": "host",
        "bytes": memory.host_blocks * page,
        "blocks": memory.host_blocks,
        "tokens": memory.geometry.num_tokens(memory.host_blocks),
        "policy": offload.policy,
        "checkpoints": memory.host_checkpoints,
        "folder": "",
    }
    whole_disk = offload.folder_bytes // whole.mesh.parallel.replica
    most, states = divide_tier(memory.geometry, whole_disk, memory.kv_bytes, memory.checkpoints)
    disk = {
        "name": "disk",
        "bytes": most,
        "blocks": most // page,
        "policy": offload.policy,
        "checkpoints": states // state if state else 0,
        "tokens": memory.geometry.num_tokens(most // page),
        "folder": offload.folder,
    }
    places = [f"{name}:{port}" for name, port in offload.sharing.of(whole.mesh.rank.replica).peers]
    peers = {"name": "peer", "policy": "read", "addresses": places}
    mapped = places and whole.machine.device == "cuda" and whole.config.hosts.nnodes == 1
    devices = [peers | {"name": "cuda_ipc"}] * bool(mapped)
    return [host, *devices, *[disk] * bool(offload.folder), *[peers] * bool(places)]

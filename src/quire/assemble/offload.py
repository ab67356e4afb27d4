"""Assembly of the tiers of KV blocks below the device: the store of an engine core, and the mover of each rank."""

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from quire import __version__
from quire.args.checkpoint import read_raw_config
from quire.assemble.loaded import Outside, RankTiers
from quire.assemble.state_tiers import disk_tier, folder_bytes, make_state_mover, state_space, state_tiers
from quire.config.env import cluster_key
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.step import Tier
from quire.kernels.ipc import IMPLEMENTATIONS
from quire.kernels.mapped import export, mappable
from quire.kv.hashing import namespace_digest
from quire.kv.pool import BlockPool
from quire.kv.states import StateCheckpoints
from quire.kv.store import KVStore
from quire.kvnet.block_peers import BlockPeers, PeerPages
from quire.kvnet.block_share import BlockShare
from quire.kvnet.device_peers import PeerDevices
from quire.kvnet.page_share import PageShare
from quire.kvstore.arena import KVArena
from quire.kvstore.disk_tier import DiskTier, FileNames
from quire.kvstore.files import BlockFiles, FileSystem
from quire.kvstore.mover import BlockMover
from quire.kvstore.shards import Shard
from quire.kvstore.states import StateArena
from quire.plan.drafts import joined
from quire.plan.engine import EnginePlan, state_types
from quire.plan.kinds import mixer
from quire.plan.kv_geometry import layer_groups, rank_geometry
from quire.plan.layout import alone
from quire.plan.memory import GIB, MemoryPlan
from quire.plan.placement import kv_heads, ranks
from quire.plan.tiers import resolve_offload
from quire.platforms.cpu import read_cpu_facts
from quire.quantization.slices import mixes_groups
from quire.weights.digest import join_sums
from quire.worker.copies import TierCopies
from quire.worker.runner import StepRunner

MOST_AHEAD = 4096  # blocks that are copied to the host tier before a step needs their room


def root_key(plan: EnginePlan) -> bytes:
    """Return the namespace of block keys, equal for all ranks of an engine.

    Where blocks leave the engine, sums of the weights tell models apart (`namespace`), and no name of a folder counts.
    """
    config, named = plan.config, not plan.offload.outside
    model = (config.model.model or "quire-tiny") + (f" {plan.draft.config.model.model}" if plan.draft else "")
    synthetic = plan.speculation is not None and bool(plan.speculation.synthetic)  # blocks belong to other tokens
    return namespace_digest(
        model=model if named else "",
        revision=(config.model.revision or "") if named else "",
        dtype=plan.dtype.dtype,
        block_size=plan.geometry.block_size,
        geometry=_whole(plan),
        weights=(json.dumps(plan.quantization, sort_keys=True) if plan.quantization else "") + "synthetic" * synthetic,
    )


def _whole(plan: EnginePlan) -> KVGeometry:
    """Return the layout of a page of the whole model, with its draft model or EAGLE head."""
    own = rank_geometry(
        plan.args,
        alone(plan.args),
        dtype=plan.cache.dtype,
        states=state_types(plan)._replace(drafts=0),  # blocks do not depend on their number
        device=plan.machine.device,
        block_size=None,
        sizes=plan.geometry.block_sizes,
    )
    return joined(own, _whole(plan.draft), plan.args.num_layers) if plan.draft else own


def make_store(
    plan: EnginePlan,
    memory: MemoryPlan,
    pool: BlockPool,
    checkpoints: StateCheckpoints | None,
    tiers: RankTiers,
    space: bytes,
) -> KVStore | None:
    """Return the store of an engine core; None when there is no tier below the device.

    checkpoints   of states on the device; None: no layer keeps states
    tiers         of the ranks, in their order
    space         see `namespace`
    """
    offload = resolve_offload(plan.config)
    if not offload.host_bytes:
        return None
    tokens = 2 * (plan.step_tokens + plan.config.scheduler.sequences()) + memory.max_model_len
    taken = sum(tokens // size for size in memory.geometry.block_sizes) + 2
    # Prompts that come together load all their blocks at once, and evict as many that no store has copied yet.
    ahead = 0 if offload.write_through else min(pool.num_blocks // 2, memory.host_blocks // 4, MOST_AHEAD)
    sharing = offload.sharing.of(plan.mesh.rank.replica)
    common = (cluster_key()[0], space) if sharing.place or sharing.peers else (b"", b"")
    disks = [disk_tier(plan, space, _names(plan), tiers.files)] if offload.folder else []
    near = [Tier.CUDA_IPC] if plan.machine.device in IMPLEMENTATIONS and not plan.config.hosts.several else []
    peers = [BlockPeers(sharing.peers, *common, tier) for tier in (*near, Tier.PEER) if sharing.peers]
    store = KVStore(
        pool,
        memory.geometry,
        num_host_blocks=memory.host_blocks,
        reserve=max(taken, ahead),
        below=(*peers[:-1], *disks, *peers[-1:]),
        promises=peers[-1] if peers else None,
        write_through=offload.write_through,
    )
    if (states := state_tiers(plan, memory, checkpoints, space, (_names(plan), tiers.files))) is not None:
        store.keep_states(states)
        disks += [one for one in states.below if isinstance(one, DiskTier)]
        peers += [one for one in states.below if isinstance(one, BlockPeers)]
    store.num_found = sum(one.num_found for one in disks[: bool(offload.folder)])
    if tiers.files:
        store.hosted.update(zip((False, True), disks, strict=False))
    store.on_start += [one.follow for one in peers]
    store.on_close += [one.close for one in disks] + [one.close for one in peers]
    if sharing.place is not None:
        own = [one for one in tiers.shards if not one.states]
        device = pool if mappable(one.memory for one in own) else None
        kept = (state_space(plan, space), [one for one in tiers.shards if one.states])
        share = BlockShare(sharing.place, *common, store, own, device=device, states=kept)
        store.on_close.append(share.close)
    return store


def check_host_memory(sizes: Iterable[MemoryPlan]) -> None:
    """Raise ConfigError when this host lacks memory for the host tiers of its ranks together. None has taken it yet."""
    needed, free = sum(map(_host_bytes, sizes)), read_cpu_facts().free_memory
    if needed > free:
        raise ConfigError(
            f"kv_offload_gb: the ranks of this host need {needed / GIB:.1f} GiB of host memory, and "
            f"{free / GIB:.1f} GiB are free: lower kv_offload_gb."
        )


def _host_bytes(memory: MemoryPlan) -> int:
    """Return the bytes of the host tier of a rank."""
    return memory.host_blocks * memory.geometry.page_bytes + memory.host_checkpoints * memory.geometry.state_bytes


def copy_blocks(
    worker: StepRunner, plan: EnginePlan, memory: MemoryPlan, arenas: tuple[KVArena, StateArena], outside: Outside
) -> RankTiers:
    """Let a runner copy blocks and checkpoints between tiers, if there are any. ConfigError if memory is short."""
    mover = _make_mover(plan, memory, arenas[0], outside)
    if mover is None:
        return RankTiers()
    states = make_state_mover(plan, memory, arenas[1], outside, _names(plan))
    copies = TierCopies(mover, states, plan.mesh.rank.number)
    worker.features.attach(copies)
    shards = mover.shards + (states.shards if states is not None else ())
    if shards and outside.address:
        shards = _served(plan, shards, outside)
    return RankTiers(shards, copies.news(first=True), copies.close)


def _served(plan: EnginePlan, shards: Sequence[Shard], outside: Outside) -> tuple[Shard, ...]:
    """Serve a rank's parts of blocks and checkpoints on its host; return them with the place where they are read."""
    place = plan.offload.sharing.of_rank(plan.mesh.rank.number, outside.address)
    served = tuple(msgspec.structs.replace(one, place=place) for one in shards)
    spaces = {state_space(plan, outside.namespace) if one.states else outside.namespace: one for one in served}
    PageShare(place, cluster_key()[0], spaces)
    return served


def _make_mover(plan: EnginePlan, memory: MemoryPlan, arena: KVArena, outside: Outside) -> BlockMover | None:
    """Return the mover of a rank for KV blocks; None when there is no tier below the device."""
    offload, space = resolve_offload(plan.config), outside.namespace
    if not offload.host_bytes:
        return None
    needed, free = _host_bytes(memory), read_cpu_facts().free_memory
    if needed > free:
        raise ConfigError(
            f"kv_offload_gb={offload.host_bytes / GIB:g}: this rank needs {needed / GIB:.1f} GiB of "
            f"host memory, and {free / GIB:.1f} GiB are free: lower kv_offload_gb."
        )
    files, name = None, _names(plan)[plan.mesh.rank.number]
    if offload.folder:
        files = BlockFiles(
            Path(offload.folder),
            space,
            name,
            page_bytes=arena.page_bytes,
            most_bytes=folder_bytes(plan, memory)[0],
            system=FileSystem(),
            shared=offload.folder_shared,
        )
    rank, peers, devices, mapping = plan.mesh.rank, None, None, None
    groups = len(plan.geometry.groups)
    sharing = offload.sharing.of(rank.replica)
    if (
        arena.pages.device.type in IMPLEMENTATIONS
        and (sharing.place or sharing.peers)
        and not plan.config.hosts.several
    ):
        mapping = IMPLEMENTATIONS[arena.pages.device.type](arena.pages.device)
    shard = Shard(
        geometry=memory.geometry,
        layer=rank.layers[0],
        heads=_first_heads(plan) + (0,) * (groups - len(layer_groups(plan.args))),
        draft_heads=tuple(_first_draft_heads(plan)),
        memory=export(mapping, arena.pages) if mapping is not None and sharing.place else None,
    )
    if sharing.peers:
        common = cluster_key()[0], space
        peers = PeerPages(sharing.peers, *common, shard)
        if mapping is not None:
            devices = PeerDevices(sharing.peers, *common, shard, mapping, arena.pages)
    return BlockMover(
        arena,
        memory.host_blocks,
        files,
        peers=peers,
        devices=devices,
        shared=shard if sharing.place else None,
        names=FileNames(Path(offload.folder), space, [name], tells=True) if files and outside.address else None,
    )


def _first_heads(plan: EnginePlan) -> tuple[int, ...]:
    """Return the number of the first KV head of the plan's rank in its model, by KV group of the model."""
    kinds = (mixer(plan.args.layers[layers[0]].mixer) for layers in layer_groups(plan.args))
    return tuple(kind.kv_heads(plan.mesh.rank.tp, plan.mesh.rank.place)[0] for kind in kinds)


def _first_draft_heads(plan: EnginePlan) -> Iterator[int]:
    """Yield the same for the draft model or EAGLE head, by KV group of the engine; 0: it has no layers there."""
    own = sum(len(group.layers) - group.num_drafts for group in plan.geometry.groups)
    for group in plan.geometry.groups:
        joined = group.layers[-1] - own if group.num_drafts else -1  # a layer of the draft model
        groups = plan.draft.geometry.groups if plan.draft else ()
        heads = _first_heads(plan.draft) if plan.draft else ()
        yield next((first for one, first in zip(groups, heads, strict=True) if joined in one.layers), 0)


def _names(plan: EnginePlan) -> list[str]:
    """Return the name of each rank's part of a page. Ranks that hold the same heads of the same tokens share files."""
    names = list[str]()
    for rank in ranks(plan.args, plan.mesh.parallel):
        heads = ".".join(f"heads{first}-{end}" for first, end in kv_heads(plan.args, rank))
        tokens = f".tokens{rank.part}of{rank.dcp}" * (rank.dcp > 1)
        names.append("layers{}-{}.".format(*rank.layers) + heads + tokens)
    if plan.draft is None:
        return names
    every = zip(names, _names(plan.draft), ranks(plan.args, plan.mesh.parallel), strict=True)
    return [f"{own}.drafts.{other}" if rank.last else own for own, other, rank in every]


def namespace(plans: Sequence[EnginePlan], reports: Sequence[bytes]) -> bytes:
    """Return the namespace of blocks in files and on other engines: that of the keys, this version, config.json and the
    weights of the model and of its draft model or EAGLE head; b"" if no block leaves the engine.

    A new version computes anew: its kernels may round otherwise, and no check tells old numbers from its own. Files of
    an old version stay until somebody deletes their folder, because that version may still run.

    plans     of the ranks that share every layer: one device, or the ranks of a replica
    reports   sums of what each rank has read (`Loaded.sums`)
    Raises WeightsError if ranks have read different weights.
    """
    plan = plans[0]
    if not plan.offload.outside:
        return b""
    about = [
        (read_raw_config(Path(one.folder), one.config.load.hf_overrides), one.dtype.dtype, one.quantization)
        for one in (plan, plan.draft)
        if one is not None
    ]
    facts = [__version__, about, plan.config.load.routing, _cut(plans)]
    return sha256(root_key(plan) + join_sums(reports) + json.dumps(facts, sort_keys=True).encode()).digest()


def _cut(plans: Sequence[EnginePlan]) -> tuple[int, bool]:
    """Return the part of the ranks' sizes on which the numbers in blocks depend.

    Where activations have one scale per token, each rank takes it from its slice of the inputs of o_proj and down_proj.
    Slices of columns in activation order are dequantized, and rounded to the type of the computation.
    """
    tp, whole = plans[0].mesh.parallel.tp, plans[0].mesh.parallel.experts
    each = [one for plan in plans for one in (plan, plan.draft) if one is not None]
    per_token = any(param.scheme and param.scheme.inputs == "token" for one in each for param in one.params)
    rounded = any(
        param.stored is not None and mixes_groups(param.parts, param.stored)
        for one in each
        if one.dtype.dtype != "float32"
        for param in one.params
    )
    return (tp, whole) if tp > 1 and (per_token or rounded) else (1, True)

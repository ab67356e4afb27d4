"""Assembly of the tiers of checkpoints below the device: those of an engine core, and the mover of each rank.

Files of checkpoints lie beside those of KV blocks, in a folder of their own for each rank. Its name has two parts more:
the rank's place in tensor parallelism, because each rank has other heads of a state, and a digest of the layout of a
state, because the layout depends on the number of drafts and on the type of matrices.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from quire.assemble.loaded import Outside
from quire.config.env import cluster_key
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import FileNews
from quire.kv.states import StateCheckpoints
from quire.kv.store import StateTiers
from quire.kvnet.block_peers import BlockPeers, PeerPages
from quire.kvstore.disk_tier import DiskTier, FileNames
from quire.kvstore.files import BlockFiles, FileSystem
from quire.kvstore.mover import BlockMover
from quire.kvstore.shards import Shard
from quire.kvstore.states import CheckpointPages, StateArena
from quire.plan.engine import EnginePlan, state_types
from quire.plan.kv_geometry import rank_geometry, state_groups
from quire.plan.layout import alone
from quire.plan.memory import MemoryPlan
from quire.plan.placement import ranks
from quire.plan.state_memory import divide_tier


def state_tiers(
    plan: EnginePlan,
    memory: MemoryPlan,
    checkpoints: StateCheckpoints | None,
    space: bytes,
    files: tuple[list[str], Sequence[FileNews]],
) -> StateTiers | None:
    """Return the tiers of checkpoints of an engine core; None: no layer keeps states.

    space   see `quire.assemble.offload.namespace`
    files   names of the folders of blocks, in the order of the ranks; first news of ranks on other hosts
    """
    if checkpoints is None:
        return None
    names, news = files
    sharing = plan.offload.sharing.of(plan.mesh.rank.replica)
    disks = (disk_tier(plan, space, _names(plan, names), news, states=True),) if plan.offload.folder else ()
    peers = None
    if sharing.peers:
        peers = BlockPeers(sharing.peers, cluster_key()[0], state_space(plan, space), what="checkpoints of states")
    return StateTiers(
        checkpoints=checkpoints,
        num_host_blocks=memory.host_checkpoints,
        below=disks if peers is None else (*disks, peers),
        promises=peers,
    )


def disk_tier(
    plan: EnginePlan, space: bytes, names: list[str], news: Sequence[FileNews], *, states: bool = False
) -> DiskTier:
    """Return the disk tier of an engine core, for blocks or for checkpoints of states.

    names   of the folders, in the order of the ranks;  news  first ones of ranks on other hosts
    """
    every = zip(ranks(plan.args, plan.mesh.parallel), names, strict=True)
    own = {rank.number: name for rank, name in every if rank.replica == plan.mesh.rank.replica}
    return DiskTier(Path(plan.offload.folder), space, own, [one for one in news if one.states == states])


def state_space(plan: EnginePlan, space: bytes) -> bytes:
    """Return the namespace of checkpoints on other engines, equal where ranks hold equal parts of a state.

    space   see `quire.assemble.offload.namespace`
    """
    parts = [(rank.layers, rank.place, rank.tp) for rank in ranks(plan.args, plan.mesh.parallel) if not rank.replica]
    return sha256(space + _layout(plan).encode() + msgspec.msgpack.encode(parts)).digest()


def make_state_mover(
    plan: EnginePlan, memory: MemoryPlan, states: StateArena, outside: Outside, names: list[str]
) -> BlockMover | None:
    """Return the mover of a rank's checkpoints; None: no layer keeps states. names: of the folders of blocks."""
    if not memory.host_checkpoints:
        return None
    pages, files, space = states.checkpoints(memory.checkpoints), None, outside.namespace
    folder, name = Path(plan.offload.folder), _names(plan, names)[plan.mesh.rank.number]
    if plan.offload.folder:
        files = BlockFiles(
            folder,
            space,
            name,
            page_bytes=pages.page_bytes,
            most_bytes=folder_bytes(plan, memory)[1] or plan.offload.folder_bytes,  # of a stage without states: enough
            system=FileSystem(),
            shared=plan.offload.folder_shared,
        )
    sharing = plan.offload.sharing.of(plan.mesh.rank.replica)
    shard = _shard(plan, pages)
    peers = PeerPages(sharing.peers, cluster_key()[0], state_space(plan, space), shard) if sharing.peers else None
    return BlockMover(
        pages,
        memory.host_checkpoints,
        files,
        peers=peers,
        shared=shard if sharing.place is not None else None,
        names=FileNames(folder, space, [name], tells=True) if files and outside.address else None,
    )


def _shard(plan: EnginePlan, pages: CheckpointPages) -> Shard:
    """Return the part of each checkpoint that the rank of a plan holds: a block of one component."""
    name = f"state {_layout(plan)}"
    whole = KVComponent(name, num_heads=1, head_dim=pages.page_bytes, dtype="uint8", item_bytes=1)
    group = KVGroup(layers=(0,), components=(whole,), block_size=1)
    rank = plan.mesh.rank
    return Shard(geometry=KVGeometry(groups=(group,)), layer=rank.layers[0], heads=(rank.place,), states=True)


def folder_bytes(plan: EnginePlan, memory: MemoryPlan) -> tuple[int, int]:
    """Return the most bytes of a rank's files: of KV blocks, and of checkpoints."""
    most = plan.offload.folder_bytes // plan.mesh.parallel.replica
    return divide_tier(memory.geometry, most, memory.kv_bytes, memory.checkpoints)


def _layout(plan: EnginePlan) -> str:
    """Return a digest of the layout of a state in all layers of the model, and of its draft model."""
    whole = rank_geometry(
        plan.args,
        alone(plan.args),
        dtype=plan.cache.dtype,
        states=state_types(plan),
        device=plan.machine.device,
        block_size=None,
        sizes=plan.geometry.block_sizes,
    )
    draft = plan.draft
    more = (
        state_groups(draft.args, alone(draft.args), state_types(plan)._replace(activations=draft.dtype.dtype))
        if draft is not None
        else ()
    )
    return sha256(msgspec.msgpack.encode((whole.states, more))).hexdigest()[:8]


def _names(plan: EnginePlan, names: list[str]) -> list[str]:
    """Return the name of the folder of each rank's checkpoints."""
    layout, every = _layout(plan), ranks(plan.args, plan.mesh.parallel)
    return [f"{name}.states{one.place}of{one.tp}-{layout}" for name, one in zip(names, every, strict=True)]

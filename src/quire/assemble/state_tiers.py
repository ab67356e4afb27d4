"""Assembly of the tiers of checkpoints below the device: those of an engine core, and the mover of each rank.

Files of checkpoints lie beside those of KV blocks, in a folder of their own for each rank. Its name has two parts more:
the rank's place in tensor parallelism, because each rank has other heads of a state, and a digest of the layout of a
state, because the layout depends on the number of drafts and on the type of matrices.
"""

from hashlib import sha256
from pathlib import Path

import msgspec

from quire.config.env import cluster_key
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.kv.states import StateCheckpoints
from quire.kv.store import StateTiers
from quire.kvnet.block_peers import BlockPeers, PeerPages
from quire.kvstore.files import BlockFiles, DiskTier, FileSystem
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
    plan: EnginePlan, memory: MemoryPlan, checkpoints: StateCheckpoints | None, space: bytes, names: list[str]
) -> StateTiers | None:
    """Return the tiers of checkpoints of an engine core; None: no layer keeps states.

    space   see `quire.assemble.offload.namespace`
    names   of the folders of blocks, in the order of the ranks
    """
    if checkpoints is None:
        return None
    folder, sharing = plan.offload.folder, plan.offload.sharing.of(plan.mesh.rank.replica)
    disks = (DiskTier(Path(folder), space, _names(plan, names)),) if folder else ()
    peers = None
    if sharing.peers:
        peers = BlockPeers(sharing.peers, cluster_key()[0], state_space(plan, space), what="checkpoints of states")
    return StateTiers(
        checkpoints=checkpoints,
        num_host_blocks=memory.host_checkpoints,
        below=disks if peers is None else (*disks, peers),
        promises=peers,
    )


def state_space(plan: EnginePlan, space: bytes) -> bytes:
    """Return the namespace of checkpoints on other engines, equal where ranks hold equal parts of a state.

    space   see `quire.assemble.offload.namespace`
    """
    parts = [(rank.layers, rank.place, rank.tp) for rank in ranks(plan.args, plan.mesh.parallel) if not rank.replica]
    return sha256(space + _layout(plan).encode() + msgspec.msgpack.encode(parts)).digest()


def make_state_mover(
    plan: EnginePlan, memory: MemoryPlan, states: StateArena, space: bytes, names: list[str]
) -> BlockMover | None:
    """Return the mover of a rank's checkpoints; None: no layer keeps states. Parameters as of `state_tiers`."""
    if not memory.host_checkpoints:
        return None
    pages, files = states.checkpoints(memory.checkpoints), None
    if plan.offload.folder:
        files = BlockFiles(
            Path(plan.offload.folder),
            space,
            _names(plan, names)[plan.mesh.rank.number],
            page_bytes=pages.page_bytes,
            most_bytes=folder_bytes(plan, memory)[1] or plan.offload.folder_bytes,  # of a stage without states: enough
            system=FileSystem(),
            shared=plan.offload.folder_shared,
        )
    sharing = plan.offload.sharing.of(plan.mesh.rank.replica)
    shard = _shard(plan, pages)
    peers = PeerPages(sharing.peers, cluster_key()[0], state_space(plan, space), shard) if sharing.peers else None
    return BlockMover(
        pages, memory.host_checkpoints, files, peers=peers, shared=shard if sharing.place is not None else None
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

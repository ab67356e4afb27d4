"""The map of KV blocks of a core, with the requests that hold them, as JSON. Made on demand, between two steps."""

import time

import msgspec

from quire.contracts.live import BlockMap, BlockOwner, EngineBlocks, MappedGroup
from quire.engine.core import EngineCore
from quire.engine.replicas import Core
from quire.kv.census import pool_map
from quire.procs.live_feed import living


def block_map(core: Core) -> str:
    """Return `BlockMap` as JSON."""
    began = time.perf_counter()
    engines = [_engine(number, one) for number, one in living(core)]
    found = BlockMap(at=time.time(), cost_s=time.perf_counter() - began, engines=engines)
    return msgspec.json.encode(found).decode()


def _engine(number: int, core: EngineCore) -> EngineBlocks:
    scheduler = core.scheduler
    allocator, store = scheduler.allocator, scheduler.roster.store
    return EngineBlocks(
        replica=number,
        block_size=allocator.block_size,
        groups=[MappedGroup(window=group.window, block_size=group.block_size) for group in allocator.groups],
        device=pool_map(allocator.pool),
        host=None if store is None else pool_map(store.blocks.host),
        states=None if allocator.states is None else pool_map(allocator.states.pool),
        owners=[
            BlockOwner(
                handle=request.new.handle,
                id=request.new.request_id,
                tenant=request.new.account.tenant,
                slot=request.slot,
                tokens=len(request.tokens),
                tables=[allocator.table(request.slot, group) for group in range(len(allocator.groups))],
            )
            for request in scheduler.table.active()
        ],
    )

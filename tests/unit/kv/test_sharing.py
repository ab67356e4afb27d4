"""Leases of host blocks: blocks stay until the other engine has them, says so, or is silent for too long."""

from array import array
from typing import Any

import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.request import NewRequest, Transfer
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import FinishedCopy
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.sharing import LEASE_SECONDS
from quire.kv.store import KVStore

GROUP = KVGroup(
    block_size=4, layers=(0,), components=(KVComponent("kv", num_heads=1, head_dim=1, dtype="float32", item_bytes=4),)
)


class Rig:
    """A store whose copies end when `copy` is called."""

    def __init__(self, host_blocks: int = 8, promises: Any = None) -> None:
        self.now, self.pool = 0.0, BlockPool(8)
        self.store = KVStore(
            self.pool,
            KVGeometry(groups=(GROUP,)),
            num_host_blocks=host_blocks,
            promises=promises,
            reserve=0,
            clock=lambda: self.now,
        )
        self.sharing, self.host = self.store.sharing, self.store.host

    def prompt(self, first: int) -> KeyChain:
        """Bring two blocks to the device."""
        chain = KeyChain(bytes(32), 4, array("I", [first] * 8))
        for block, key in zip(self.pool.take(2), chain.keys(2), strict=True):
            self.pool.publish(block, key)
            self.pool.release([block])
        return chain

    def copy(self) -> int:
        """Plan copies and end them; return the number of blocks."""
        copies = self.store.take_copies()
        jobs = () if copies is None else copies.before + copies.after
        self.store.check()
        self.store.finished([FinishedCopy(id=job.id) for job in jobs])
        self.store.check()
        return sum(len(job.keys) for job in jobs)

    def held(self) -> int:
        self.store.check()
        return len(self.sharing.held())


def test_kept_blocks_are_stored_and_not_evicted() -> None:
    rig = Rig()
    chain = rig.prompt(1)
    assert rig.copy() == 0, "the policy is lazy"
    rig.sharing.keep("a", chain, 2)
    assert rig.held() == 0 and rig.copy() == 2 and rig.held() == 2
    rig.host.release(rig.host.take(6))
    assert rig.host.num_free == 6 and all(rig.host.lookup(key) for key in chain.keys(2))
    rig.sharing.keep("b", chain, 1)
    assert rig.held() == 3 and rig.copy() == 0, "they are there"


@pytest.mark.parametrize("how", ["given back", "silent", "granted again", "reset"])
def test_a_lease_ends(how: str) -> None:
    rig = Rig()
    rig.sharing.keep("a", rig.prompt(1), 2)
    rig.copy()
    rig.now += LEASE_SECONDS - 1
    rig.sharing.told.put(("a", True))
    rig.sharing.told.put(("unknown", False))
    rig.copy()
    rig.now += LEASE_SECONDS - 1
    rig.copy()
    assert rig.held() == 2, "it was renewed"
    if how == "given back":
        rig.sharing.told.put(("a", False))
    elif how == "silent":
        rig.now += 1
    elif how == "granted again":
        rig.sharing.keep("a", rig.prompt(2), 0)
    else:
        rig.pool.reset()
        rig.store.reset()
        rig.now += LEASE_SECONDS
    rig.copy()
    assert rig.held() == 0 and rig.host.num_free == 8


def test_leases_take_at_most_half_and_the_oldest_goes() -> None:
    rig = Rig(host_blocks=6)
    for first in (1, 2):
        rig.sharing.keep(str(first), rig.prompt(first), 2)
        rig.copy()
    assert rig.held() == 2 and list(rig.sharing._leases) == ["2"]
    rig = Rig(host_blocks=2)
    rig.sharing.keep("a", rig.prompt(1), 2)
    rig.copy()
    assert rig.held() == 1


class Promised:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def expect(self, *call: Any) -> None:
        self.calls.append(call)

    def settle(self, handle: int) -> None:
        self.calls.append(handle)


def test_a_promise_is_of_the_blocks_that_the_other_engine_computed() -> None:
    promised, spec = Promised(), SamplerSpec(seed=0, num_prompt=9)
    rig = Rig(promises=promised)
    chain = KeyChain(bytes(32), 4, array("I", range(9)))

    def asks(transfer: Transfer | None) -> None:
        rig.sharing.expect(
            NewRequest(handle=5, request_id="", token_ids=b"", max_tokens=1, sampler=spec, transfer=transfer), chain
        )

    asks(None)
    asks(Transfer(name="mine"))
    assert not promised.calls
    for tokens, blocks in ((7, 1), (8, 2), (1_000, 2)):
        asks(transfer := Transfer(name="a", address="b:1", num_tokens=tokens))
        assert promised.calls.pop() == (5, transfer, chain.keys(blocks))
    rig.sharing.settle(5)
    assert promised.calls == [5]


def test_a_request_that_comes_home_ends_its_lease() -> None:
    """Another replica of the prefill node may get it, or the one that has the blocks."""
    promised, spec = Promised(), SamplerSpec(seed=0, num_prompt=9)
    rig = Rig(promises=promised)
    chain = rig.prompt(1)
    rig.sharing.keep("a", chain, 2)
    rig.copy()
    home = Transfer(name="a", address="this:1", num_tokens=8)
    rig.sharing.expect(
        NewRequest(handle=5, request_id="", token_ids=b"", max_tokens=1, sampler=spec, transfer=home), chain
    )
    rig.copy()
    assert not promised.calls and rig.held() == 0 and all(rig.host.lookup(key) for key in chain.keys(2))

"""Promises of blocks between engines: what this one keeps for others (leases), and what others keep for its requests.

A lease ends when the other engine gives it back, or has not renewed it for LEASE_SECONDS. Blocks on their way to the
host tier join their leases when they come. Knows keys and pools; nothing of the other engines.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from quire.contracts.request import NewRequest, Transfer
from quire.contracts.step import DroppedFiles, FileNews, Tier
from quire.kv.hashing import KeyChain, group_keys
from quire.kv.pool import BlockPool

LEASE_SECONDS = 30.0
MOST_LEASED = 0.5  # of the host tier; beyond it the oldest leases end


KeysOf = Callable[[KeyChain, int], list[bytes]]  # (chain, tokens of a prompt) -> keys of what continues it


def block_keys(sizes: tuple[int, ...]) -> KeysOf:
    """Return the function that gives the keys of all full blocks of a prompt. sizes: tokens of a block, by group."""

    def keys_of(chain: KeyChain, num_tokens: int) -> list[bytes]:
        return [key for group, size in enumerate(sizes) for key in group_keys(chain, group, size, num_tokens // size)]

    return keys_of


class KeyedTier(Protocol):
    """A tier below the host tier that finds blocks by key, such as files on a disk.

    takes   True: host blocks are written to it
    """

    tier: Tier
    takes: bool

    def has(self, key: bytes) -> bool:
        """True when the tier seems to hold the block on every rank. A job may find that it does not."""

    def holders(self, keys: Iterable[bytes]) -> Sequence[int]:
        """Return `CopyJob.sources` of blocks that come from this tier."""

    def holder(self, key: bytes) -> str:
        """Return the address of the engine that a block comes from; "" for a tier of this engine."""

    def note_written(self, keys: Iterable[bytes]) -> None:
        """Hold blocks that a job has written on every rank."""

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget blocks whose content cannot be trusted."""

    def clear(self) -> None:
        """Forget all blocks."""


class HostedFiles(Protocol):
    """Files of ranks on other hosts than the engine core's: the core hears of them, and says which are deleted."""

    def hear(self, news: FileNews) -> None:
        """Hear which files a rank has."""

    @property
    def drops(self) -> bool:
        """True when ranks are still to be told of files that they delete."""

    def take_dropped(self, *, states: bool) -> tuple[DroppedFiles, ...]:
        """Return the files that ranks delete, for the next plan."""


class Promises(Protocol):
    """Blocks that other engines have, or have promised to requests: both count as there, see `KeyedTier.has`."""

    def expect(self, handle: int, transfer: Transfer, keys: list[bytes]) -> None:
        """Count on blocks, and make the other engine keep them, until `settle`."""

    def settle(self, handle: int) -> None:
        """End the promise to a request, if there is one."""


@dataclass(eq=False)
class _Lease:
    until: float
    missing: set[bytes]
    blocks: list[int] = field(default_factory=list)


class Sharing:
    """Leases of host blocks by name, and the promises that requests count on. One thread calls it.

    told     (name, True: renew the lease, False: end it), for `expire`; any thread may put
    states   the same for the checkpoints at the ends of the prompts, or None
    """

    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool,
        keys_of: KeysOf,
        store: Callable[[int, bytes], None],
        promises: Promises | None,
        clock: Callable[[], float],
    ) -> None:
        self.told = SimpleQueue[tuple[str, bool]]()
        self.states: Sharing | None = None
        self._pool, self._host, self._keys_of, self._store = pool, host, keys_of, store
        self._promises, self._clock = promises, clock
        self._leases: dict[str, _Lease] = {}  # the oldest first
        self._num_held = 0
        host.on_publish.append(self._came)

    def expect(self, new: NewRequest, chain: KeyChain) -> None:
        """Count on the blocks that another engine has computed for a new request."""
        if self._promises is not None and new.transfer is not None and new.transfer.address:
            if new.transfer.name in self._leases:  # the prefill node is this engine, which has the blocks
                self.told.put((new.transfer.name, False))
                return
            tokens = min(new.transfer.num_tokens, len(chain.tokens))
            self._promises.expect(new.handle, new.transfer, self._keys_of(chain, tokens))
            if self.states is not None:
                self.states.expect(new, chain)

    def settle(self, handle: int) -> None:
        """Count on nothing more for a request, which runs or has ended."""
        if self._promises is not None:
            self._promises.settle(handle)
        if self.states is not None:
            self.states.settle(handle)

    def keep(self, name: str, chain: KeyChain, num_blocks: int, num_prompt: int = 0) -> None:
        """Keep the first blocks of a chain in the host tier under a lease, and store those that are not there.

        num_prompt   tokens of the prompt, whose checkpoint is kept, too
        """
        self._keep(name, self._keys_of(chain, num_blocks * chain.block_size))
        if self.states is not None:
            self.states._keep(name, self.states._keys_of(chain, num_prompt))

    def _keep(self, name: str, keys: list[bytes]) -> None:
        if name in self._leases:
            self._end(name)
        lease = self._leases[name] = _Lease(self._clock() + LEASE_SECONDS, set(keys))
        for key in keys:
            if (copy := self._host.lookup(key)) is not None:
                self._hold(lease, copy, key)
            elif (block := self._pool.lookup(key)) is not None:
                self._store(block, key)

    def expire(self) -> None:
        """End the leases whose time is over and those that were given back."""
        while not self.told.empty():
            told = self.told.get()
            for one in (self, self.states):
                if one is not None:
                    one._hear(*told)
        for one in (self, self.states):
            if one is not None:
                one._end_late()

    def held(self) -> list[int]:
        """Return the host blocks that leases reference, once per reference."""
        return [block for lease in self._leases.values() for block in lease.blocks]

    def _hear(self, name: str, renew: bool) -> None:
        if (lease := self._leases.get(name)) is not None:
            lease.until = self._clock() + LEASE_SECONDS if renew else 0.0

    def _end_late(self) -> None:
        for name in [name for name, lease in self._leases.items() if lease.until <= self._clock()]:
            self._end(name)

    def _came(self, block: int, key: bytes) -> None:
        for lease in [lease for lease in self._leases.values() if key in lease.missing]:
            self._hold(lease, block, key)

    def _hold(self, lease: _Lease, block: int, key: bytes) -> None:
        oldest: Iterable[str] = list(self._leases)
        for name in oldest:
            if self._num_held < MOST_LEASED * self._host.num_blocks or self._leases[name] is lease:
                break
            self._end(name)
        if self._num_held < MOST_LEASED * self._host.num_blocks:
            self._host.share((block,))
            self._num_held += 1
            lease.blocks.append(block)
        lease.missing.discard(key)

    def _end(self, name: str) -> None:
        blocks = self._leases.pop(name).blocks
        self._num_held -= len(blocks)
        self._host.release(blocks)

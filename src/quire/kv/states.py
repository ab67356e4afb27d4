"""Checkpoints of states: copies of what recurrent layers keep of a request, at some length of it, found by key.

A state stands for all tokens before a length, and for that length alone. So a prefix can be continued only where a
checkpoint is. A checkpoint is copied in a step and can be found when the step's result has come. Its key is that of the
block of the request's chain that ends at its length. One is taken

    of a prompt   at the last place before its last token, and where blocks of another prompt ended that has the same
                  beginning and no checkpoint there
    of a decode   every `every` tokens, into one that the request holds; it is found when the request leaves its slot

A decode with drafts passes a length in a step that nobody knows yet, and may pass it again when drafts before it are
rejected. So every plan asks for the copy, from the first one that may pass the length until one that is surely behind
it; a step that does not compute the token before the length writes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool

MOST_COPIES = 2  # of a slot in a step


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """A copy of a slot's state to a checkpoint, in a step, when the slot has `length` tokens.

    held   True: the request holds the checkpoint; it is found when the request leaves its slot
    """

    slot: int
    handle: int
    length: int
    checkpoint: int
    chain: KeyChain
    held: bool = False


class StateCheckpoints:
    """The checkpoints that there are, and the copies that a step makes.

    unit    a checkpoint stands at a multiple of so many tokens, where blocks of all KV groups end
    every   tokens between two copies of a decode, a multiple of `unit`
    behind  tokens by which the states of a draft model may be behind those of the model; 0: it keeps none
    pool    the checkpoints, by number from 1 on
    restored   (slot, checkpoint) of the requests, admitted by the plan that is being made, that go on at a checkpoint
    hits    tokens found by checkpoints since the start; cut   tokens found in blocks and without a checkpoint
    """

    def __init__(self, num_checkpoints: int, unit: int, every: int, behind: int = 0) -> None:
        assert every % unit == 0, "copies of decodes stand at places of checkpoints"
        self.pool, self.unit, self.every, self._behind = BlockPool(num_checkpoints), unit, every, behind
        self.hits = self.cut = 0
        self.restored: list[tuple[int, int]] = []
        self._held: dict[int, tuple[int, int]] = {}  # slot -> (checkpoint, length) of its decode's last copy
        self._branch: dict[int, int] = {}  # slot -> length at which its prompt left one that was cached

    def find(self, chain: KeyChain, most: int) -> tuple[int, int]:
        """Return (length, checkpoint) of the longest beginning of a chain with a checkpoint; (0, 0): there is none.

        most   most tokens of the beginning
        """
        for length in range(most - most % self.unit, 0, -self.unit):
            if (found := self.pool.lookup(self._key(chain, length))) is not None:
                return length, found
        return 0, 0

    def enter(self, slot: int, checkpoint: int, length: int, reach: int) -> None:
        """Note the admission of a request that goes on at `length`, where it has `checkpoint` (0: at its beginning).

        reach   tokens whose KV blocks were found
        """
        if checkpoint:
            self.restored.append((slot, checkpoint))  # the last to be evicted from here on
            self.pool.share([checkpoint])
            self.pool.release([checkpoint])
        self.hits += length
        self.cut += reach - length
        if reach > length:
            self._branch[slot] = reach - reach % self.unit

    def of_prompt(self, slot: int, handle: int, chain: KeyChain, before: int, after: int, goal: int) -> list[StateCopy]:
        """Return the copies of a prompt of `goal` tokens in a step that computes its tokens before .. after - 1."""
        places = {(goal - 1) // self.unit * self.unit, self._branch.get(slot, 0)}
        taken = list[StateCopy]()
        for length in sorted(places):
            if before < length <= after and self.pool.num_free and self.pool.lookup(self._key(chain, length)) is None:
                (checkpoint,) = self.pool.take(1)
                taken.append(StateCopy(slot=slot, handle=handle, length=length, checkpoint=checkpoint, chain=chain))
        return taken

    def of_decode(
        self, slot: int, handle: int, chain: KeyChain, least: int, before: int, after: int
    ) -> list[StateCopy]:
        """Return the copy of a decode in a step that computes tokens least .. after - 1, or some of them.

        least, before   the least and the most tokens that are computed before the step
        """
        checkpoint, length = self._held.get(slot, (0, 0))
        if length <= least:
            length = after - after % self.every
            if length <= before:  # else an earlier step may have passed it
                return []
            if not checkpoint:
                if not self.pool.num_free:
                    return []
                (checkpoint,) = self.pool.take(1)
            self._held[slot] = checkpoint, length
        if length > after:
            return []
        return [StateCopy(slot=slot, handle=handle, length=length, checkpoint=checkpoint, chain=chain, held=True)]

    def came(self, copies: Iterable[StateCopy], failed: frozenset[int] = frozenset()) -> None:
        """Make the copies of a step known, whose result has come. failed: slots whose results are invalid."""
        for one in copies:
            if not one.held:
                self._settle(one.checkpoint, one.chain, one.length * (one.slot not in failed))

    def leave(self, slot: int, chain: KeyChain, computed: int) -> None:
        """Note that a request leaves its slot. computed: tokens of it that are computed and known; 0: none is sound."""
        self._branch.pop(slot, None)
        self.restored = [one for one in self.restored if one[0] != slot]
        if (held := self._held.pop(slot, None)) is not None:
            checkpoint, length = held
            self._settle(checkpoint, chain, length * (length <= computed - self._behind))

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Forget the checkpoints with these keys."""
        found = [self.pool.lookup(key) for key in keys]
        self.pool.forget([one for one in found if one is not None])

    def check(self, running: Iterable[int]) -> None:
        """Assert every invariant. running: slots that are taken."""
        self.pool.check()
        assert self._held.keys() <= set(running), "a slot that is free holds a checkpoint"

    def num_held(self) -> int:
        """Return the number of checkpoints that running requests hold."""
        return len(self._held)

    def _settle(self, checkpoint: int, chain: KeyChain, length: int) -> None:
        if length:
            self.pool.publish(checkpoint, self._key(chain, length))
        self.pool.release([checkpoint])

    @staticmethod
    def _key(chain: KeyChain, length: int) -> bytes:
        place = length // chain.block_size
        return chain.keys(place, place - 1)[0]

"""Checkpoints of states: copies of what recurrent layers keep of a request, at some length of it, found by key.

A state stands for all tokens before a length, and for that length alone. So a prefix can be continued only where a
checkpoint is. A checkpoint is copied in a step and can be found when the step's result has come. Its key is that of the
block of the request's chain that ends at its length. One is taken, where `CheckpointPlaces` say so,

    of a prompt   at the last place before its last token, where blocks of another prompt ended that has the same
                  beginning and no checkpoint there, and at multiples of a number of tokens
    of a decode   every `every` tokens, into one that the request holds; it is found when the request leaves its slot

A prompt that goes on where a request has ended is no branch: the next turn of a conversation has nothing to share. Only
a second one that parts there is. When a prompt leaves a checkpoint behind the one with which it began, and nobody else
has gone on at that one, that one is the first to be evicted: a conversation needs its last checkpoint alone.

A decode with drafts passes a length in a step that nobody knows yet, and may pass it again when drafts before it are
rejected. So every plan asks for the copy, from the first one that may pass the length until one that is surely behind
it; a step that does not compute the token before the length writes nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire.config.checkpoints import CheckpointPlaces
from quire.contracts.output import StateStats
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool

ALL_PLACES = CheckpointPlaces()
MOST_COPIES = 2  # of a slot in a step
REMEMBERED = 4096  # ends of requests, and checkpoints at ends of prompts


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """A copy of a slot's state to a checkpoint, in a step, when the slot has `length` tokens.

    held   True: the request holds the checkpoint; it is found when the request leaves its slot
    end    True: it is at the end of a prompt
    behind   of such a one: key of the checkpoint at the end of a prompt with which this prompt began; b"": of none
    """

    slot: int
    handle: int
    length: int
    checkpoint: int
    chain: KeyChain
    held: bool = False
    end: bool = False
    behind: bytes = b""


class StateCheckpoints:
    """The checkpoints that there are, and the copies that a step makes.

    unit    a checkpoint stands at a multiple of so many tokens, where blocks of all KV groups end
    every   tokens between two copies of a decode, a multiple of `unit`
    behind  tokens by which the states of a draft model may be behind those of the model; 0: it keeps none
    places  places at which checkpoints are taken; see `CheckpointPlaces.on_blocks`
    pool    the checkpoints, by number from 1 on
    restored   (slot, checkpoint) of the requests, admitted by the plan that is being made, that go on at a checkpoint
    hits    tokens found by checkpoints since the start; cut   tokens found in blocks and without a checkpoint
    taken   checkpoints that could be found since the start
    """

    def __init__(
        self, num_checkpoints: int, unit: int, every: int, behind: int = 0, places: CheckpointPlaces = ALL_PLACES
    ) -> None:
        assert every % unit == 0, "copies of decodes stand at places of checkpoints"
        self.pool, self.unit, self.every, self.places = BlockPool(num_checkpoints), unit, every, places.on_blocks(unit)
        self._behind = behind
        self.hits = self.cut = self.taken = 0
        self.restored: list[tuple[int, int]] = []
        self._held: dict[int, tuple[int, int]] = {}  # slot -> (checkpoint, length) of its decode's last copy
        self._coming: dict[int, tuple[KeyChain, int]] = {}  # checkpoint that is taken, and not found yet -> its place
        self._entered: dict[int, int] = {}  # slot -> length at which its request was admitted
        self._ends = OrderedDict[
            bytes, None
        ]()  # keys of places where requests have ended, until a prompt goes on there
        self._uses = OrderedDict[bytes, int]()  # checkpoint at the end of a prompt -> prompts that have gone on there
        self._origin: dict[int, bytes] = {}  # slot -> key of such a checkpoint, with which its prompt began
        self._branch: dict[int, int] = {}  # slot -> length at which its prompt left one that was cached

    def find(self, chain: KeyChain, most: int) -> tuple[int, int]:
        """Return (length, checkpoint) of the longest beginning of a chain with a checkpoint; (0, 0): there is none.

        most   most tokens of the beginning
        """
        return last_state(chain, most, self.unit, self.pool.lookup)

    def enter(self, slot: int, chain: KeyChain, checkpoint: int, length: int, reach: int) -> None:
        """Note the admission of a request that goes on at `length`, where it has `checkpoint` (0: at its beginning).

        reach   tokens whose KV blocks were found
        """
        if checkpoint:
            self.restored.append((slot, checkpoint))
            self.pool.share([checkpoint])  # a load must not overwrite it before the step
            if (key := self.pool.key(checkpoint)) is not None and key in self._uses:
                self._uses[key] += 1
                self._origin[slot] = key
        self._entered[slot] = length
        self.hits += length
        self.cut += reach - length
        place = reach - reach % self.unit
        if place > length:
            key = state_key(chain, place)
            if key in self._ends:  # the first to go on there; the next one parts from it
                del self._ends[key]
            else:
                self._branch[slot] = place

    def take_restored(self) -> list[tuple[int, int]]:
        """Return (slot, checkpoint) of the requests that the plan admits, and hold the checkpoints no more.

        Copies of the same step may overwrite them: states are restored first.
        """
        restored, self.restored = self.restored, []
        self.pool.release([checkpoint for _, checkpoint in restored])
        return restored

    def of_prompt(self, slot: int, handle: int, chain: KeyChain, before: int, after: int, goal: int) -> list[StateCopy]:
        """Return the copies of a prompt of `goal` tokens in a step that computes its tokens before .. after - 1."""
        end = prompt_end(goal, self.unit)
        lengths = [end] * self.places.prompt + [self._branch.get(slot, 0)] * self.places.branch
        if stride := self.places.every:
            lengths += range(after - after % stride, before, -stride)
        taken = list[StateCopy]()
        for length in dict.fromkeys(lengths):
            if len(taken) == MOST_COPIES or not self.pool.num_free:
                break
            if before < length <= after and self.pool.lookup(state_key(chain, length)) is None:
                (checkpoint,) = self.pool.take(1)
                behind, last = self._origin.get(slot, b""), length == end
                taken.append(
                    StateCopy(
                        slot=slot,
                        handle=handle,
                        length=length,
                        checkpoint=checkpoint,
                        chain=chain,
                        end=last,
                        behind=behind if last else b"",
                    )
                )
                self._coming[checkpoint] = chain, length
        return sorted(taken, key=lambda one: one.length)

    def of_decode(
        self, slot: int, handle: int, chain: KeyChain, least: int, before: int, after: int
    ) -> list[StateCopy]:
        """Return the copy of a decode in a step that computes tokens least .. after - 1, or some of them.

        least, before   the least and the most tokens that are computed before the step
        """
        if not self.places.turn:
            return []
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
            self._coming[checkpoint] = chain, length
        if length > after:
            return []
        return [StateCopy(slot=slot, handle=handle, length=length, checkpoint=checkpoint, chain=chain, held=True)]

    def came(self, copies: Iterable[StateCopy], failed: frozenset[int] = frozenset()) -> None:
        """Make the copies of a step known, whose result has come. failed: slots whose results are invalid."""
        for one in copies:
            if one.held:
                continue
            self._settle(one.checkpoint, one.chain, one.length * (one.slot not in failed))
            if one.end and one.slot not in failed:
                self._uses.setdefault(state_key(one.chain, one.length), 0)
                _forget_oldest(self._uses)
            before = self.pool.lookup(one.behind) if self._uses.get(one.behind) == 1 else None
            if before is not None and one.slot not in failed:
                self.pool.demote(before)

    def leave(self, slot: int, chain: KeyChain, computed: int, *, sound: bool = True) -> None:
        """Note that a request leaves its slot.

        computed   tokens of it that are computed and known
        sound      False: no state that it computed can be trusted
        """
        self._branch.pop(slot, None)
        self._origin.pop(slot, None)
        if sound and (end := computed - computed % self.unit) > 0:
            self._ends[state_key(chain, end)] = None
            _forget_oldest(self._ends)
        self.pool.release([checkpoint for one, checkpoint in self.restored if one == slot])
        self.restored = [one for one in self.restored if one[0] != slot]
        if (held := self._held.pop(slot, None)) is not None:
            checkpoint, length = held
            self._settle(checkpoint, chain, length * (sound and length <= computed - self._behind))
        entered = self._entered.pop(slot, 0)
        if not sound:
            self.withdraw(chain.keys(chain.num_hashed, entered // chain.block_size))

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Forget the checkpoints with these keys."""
        found = [self.pool.lookup(key) for key in keys]
        self.pool.forget([one for one in found if one is not None])

    def check(self, running: Iterable[int], held: Iterable[int] = ()) -> None:
        """Assert every invariant.

        running   slots that are taken
        held      checkpoints referenced from elsewhere, once per reference
        """
        self.pool.check()
        assert self._held.keys() <= set(running), "a slot that is free holds a checkpoint"
        own = {checkpoint for checkpoint, _ in self._held.values()}
        assert own <= self._coming.keys(), "a checkpoint that a request holds is not coming"
        refs = Counter([*self._coming, *(checkpoint for _, checkpoint in self.restored), *held])
        wrong = [one for one in range(self.pool.num_blocks + 1) if refs[one] != self.pool.refs(one)]
        assert not wrong, f"references of checkpoints {wrong[:8]} are not the number of their holders"

    def coming(self) -> set[bytes]:
        """Return the keys of checkpoints that are being taken, or that requests hold: none of them can be found yet."""
        return {state_key(chain, at) for chain, at in self._coming.values() if at <= len(chain.tokens)}

    def stats(self) -> StateStats:
        """Return the counters."""
        pool = self.pool
        return StateStats(
            hits=self.hits,
            cut=self.cut,
            taken=self.taken,
            num_checkpoints=pool.num_blocks,
            num_used=pool.num_cached,
        )

    def num_held(self) -> int:
        """Return the number of checkpoints that running requests hold."""
        return len(self._held)

    def _settle(self, checkpoint: int, chain: KeyChain, length: int) -> None:
        del self._coming[checkpoint]
        if length:
            self.taken += self.pool.publish(checkpoint, state_key(chain, length))
        self.pool.release([checkpoint])


def prompt_end(num_tokens: int, unit: int) -> int:
    """Return the last place of a prompt before its last token."""
    return (num_tokens - 1) // unit * unit


def end_key(unit: int) -> Callable[[KeyChain, int], list[bytes]]:
    """Return the function that gives the key of the checkpoint at the end of a prompt, if there is a place."""

    def keys_of(chain: KeyChain, num_tokens: int) -> list[bytes]:
        end = prompt_end(num_tokens, unit)
        return [state_key(chain, end)] if end > 0 else []

    return keys_of


def _forget_oldest(known: OrderedDict[bytes, Any]) -> None:
    if len(known) > REMEMBERED:
        known.popitem(last=False)


def state_key(chain: KeyChain, length: int) -> bytes:
    """Return the key of the checkpoint at a length of a chain, which is that of the block that ends there."""
    place = length // chain.block_size
    return chain.keys(place, place - 1)[0]


def last_state(chain: KeyChain, most: int, unit: int, lookup: Callable[[bytes], int | None]) -> tuple[int, int]:
    """Return (length, what `lookup` says) of the longest beginning of a chain with a checkpoint; (0, 0): none has one.

    most   most tokens of the beginning;  unit   tokens between two places of checkpoints
    """
    for length in range(most - most % unit, 0, -unit):
        if (found := lookup(state_key(chain, length))) is not None:
            return length, found
    return 0, 0

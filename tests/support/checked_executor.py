"""The mock executor with KV memory: it notices at once when a request reads a block that is not of its own prefix.

The "KV" at a position is a digest of all tokens up to there, so it also notices a block that was overwritten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from quire.contracts.blocks import first_seen
from quire.contracts.step import I32, BlendedChunk, StepCopies, StepPlan, StepResult
from quire.engine.mock_executor import FIRST, MASK, MockExecutor, _Slot, chain

from .mock_copies import GARBAGE, Memory, MockCopies


@dataclass
class _Table:
    """The block table of a request, by group.

    began       the first position of this step
    drafted     the first position that a drafter with layers computes at the beginning of the next step
    num_exact   tokens whose KV is that of their prefix; later ones have the request's own
    own         what distinguishes that
    """

    blocks: list[list[int]]
    own: int
    began: int = 0
    drafted: int = MASK
    num_exact: int = MASK


class CheckedExecutor(MockExecutor):
    """Runs plans on a simulated KV memory, and checks every position that a row may attend to (O(length) per step).

    windows   attention window of each KV group, as in `KVGroup`; reads are checked separately for each group
    sizes     tokens of a block of each group; (): those of the facts
    tiers     makes the tiers below the device from the mock's memory; None: there are none
    states    number of checkpoints, if layers keep states: those of slots and checkpoints are digests of the tokens
              that they stand for. A slot is not cleared; layers take FIRST for a request that begins at position 0
    state_tiers   makes the tiers of checkpoints from their memory; None: there are none
    computed  request id -> tokens computed for it so far, over all its admissions
    """

    def __init__(
        self,
        *,
        windows: Sequence[int | None] = (None,),
        sizes: Sequence[int] = (),
        tiers: Callable[[Memory], MockCopies] | None = None,
        states: int = 0,
        state_tiers: Callable[[Memory], MockCopies] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.computed: dict[str, int] = {}
        self._windows, facts = windows, self.facts()
        self._sizes = sizes or [facts.block_size] * len(windows)
        self._memory = np.zeros((facts.num_blocks + 1, max(self._sizes)), np.uint64)
        self._copies = None if tiers is None else tiers(self._memory)
        self._tables: dict[str, _Table] = {}
        self._states: dict[int, int] | None = {} if states else None  # by slot
        self._checkpoints = np.full((states + 1, 1), GARBAGE, np.uint64)
        self._state_copies = None if state_tiers is None else state_tiers(self._checkpoints)
        self._kept: dict[str, dict[int, int]] = {}  # request -> length after which a checkpoint gets its state

    def _run(self, plan: StepPlan, masks: dict[int, I32]) -> StepResult:
        if self._copies is None:
            return super()._run(plan, masks)
        self._copies.begin(_of_kind(plan.copies, states=False))
        if self._state_copies is not None:
            self._state_copies.begin(_of_kind(plan.copies, states=True))
        result = super()._run(plan, masks)
        ended = self._copies.end() + (self._state_copies.end() if self._state_copies is not None else ())
        return msgspec.structs.replace(result, copied=ended)

    def _enter(self, plan: StepPlan) -> None:
        super()._enter(plan)
        for a in plan.admitted:
            own = chain(FIRST, crc32(a.request_id.encode()))
            self._tables[a.request_id] = _Table([ids.tolist() for ids in a.block_ids], own)
        for slot, group, block in plan.appended.tolist():
            self._tables[self._slots[slot].request_id].blocks[group].append(block)
        for moved in plan.features.blended:
            self._move(moved)
        assert self._states is not None or plan.features.states is None, "no layer keeps states"
        if self._states is not None:
            self._enter_states(plan, self._states)
        if self.facts().drafts_cached:
            for slot in plan.slots[: plan.num_decodes].tolist():
                self._draft(self._slots[slot])

    def _enter_states(self, plan: StepPlan, states: dict[int, int]) -> None:
        """Restore the states of admitted requests, and note the copies of this step."""
        copies, admitted = plan.features.states, {one.slot: one for one in plan.admitted}
        restored = dict(copies.restored.tolist()) if copies is not None else {}
        assert restored.keys() <= admitted.keys(), "a state is restored of a request that is not admitted"
        for slot, one in admitted.items():
            assert (slot in restored) == (one.num_computed > 0), "a state is missing, or one too many"
            if slot in restored:
                states[slot] = int(self._checkpoints[restored[slot], 0])
        self._kept = {}
        for slot, length, checkpoint in copies.kept.tolist() if copies is not None else ():
            places = self._kept.setdefault(self._slots[slot].request_id, {})
            assert length not in places and len(places) < 2, "too many copies of a slot"
            places[length] = checkpoint
        for request, places in self._kept.items():
            (slot,) = [slot for slot, state in self._slots.items() if state.request_id == request]
            count = int(plan.num_tokens[plan.slots.tolist().index(slot)])
            before = self._slots[slot].computed
            exact = not (self.facts().num_drafts and self._slots[slot].decodes)
            assert not exact or all(before < length <= before + count for length in places), "a copy out of the step"

    def _draft(self, state: _Slot) -> None:
        """Check what the first row of a drafter with layers attends to, before a layer of the model writes."""
        table = self._tables[state.request_id]
        upto = min(table.drafted, state.computed)
        for group, window in enumerate(self._windows):
            self._check(state, group, 0 if window is None else first_seen(upto, window), upto)

    def _move(self, chunk: BlendedChunk) -> None:
        """Check that the tokens of a chunk reuse KV of the same tokens alone. What follows is the request's own KV."""
        state = self._slots[chunk.slot]
        table, positions = self._tables[state.request_id], state.computed + chunk.tokens
        assert 0 <= chunk.num_kept <= len(positions) and positions[-1] < len(state.tokens) - 1, "moved too much"
        table.num_exact = min(table.num_exact, int(positions[0]))
        alone = dict[int, list[int]]()
        assert chunk.sources.shape == (len(self._sizes), len(positions)), "a source in each group"
        for position, places, shift in zip(positions.tolist(), chunk.sources.T, chunk.shifts.tolist(), strict=True):
            digests = alone.setdefault(shift, [state.first])
            while len(digests) <= position - shift + 1:
                digests.append(chain(digests[-1], state.tokens[shift + len(digests) - 1]))
            for group, (place, size) in enumerate(zip(places.tolist(), self._sizes, strict=True)):
                own = int(self._memory[divmod(place, size)])
                assert own == digests[position - shift + 1] ^ group, "moved KV of other tokens"

    def _compute(self, state: _Slot, digests: list[int], num_valid: int) -> None:
        table = self._tables[state.request_id]
        table.began = state.computed
        if self._states is not None:
            (slot,) = [slot for slot, one in self._slots.items() if one is state]
            whole = state.digests[state.computed - 1] if state.computed else FIRST
            assert self._state_of(slot, state.computed) == whole, f"{state.request_id} goes on with another state"
            for length, checkpoint in self._kept.get(state.request_id, {}).items():
                if 0 < length - state.computed <= len(digests):  # rejected drafts, too
                    self._checkpoints[checkpoint] = digests[length - state.computed - 1]
            self._states[slot] = digests[num_valid - 1]
        for group, (size, blocks) in enumerate(zip(self._sizes, table.blocks, strict=True)):
            for position, digest in enumerate(digests, state.computed):
                block = blocks[position // size]
                assert block != 0, "the null block is written"
                own = table.own if position >= table.num_exact else 0
                if position % size == 0:
                    self._memory[block, size:] = 0  # a page is compared whole, whoever had it before
                self._memory[block, position % size] = digest ^ group ^ own
        self.computed[state.request_id] = self.computed.get(state.request_id, 0) + len(digests)
        super()._compute(state, digests, num_valid)
        table.drafted = table.began + 1 if state.decodes else state.computed

    def _reach(self, state: _Slot, limit: int) -> None:
        """Check that a drafter with layers has blocks for all tokens before `limit`."""
        if self.facts().drafts_cached:
            blocks = self._tables[state.request_id].blocks
            assert all(len(own) * size >= limit - 1 for own, size in zip(blocks, self._sizes, strict=True)), "no block"

    def _state_of(self, slot: int, computed: int) -> int:
        """Return the state with which layers go on in a slot; `computed`: position of the first row."""
        assert self._states is not None
        return self._states[slot] if computed else FIRST

    def _attend(self, state: _Slot) -> None:
        end, table = state.computed, self._tables[state.request_id]
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, table.began - window + 1)  # what the first row sees
            if window is not None and window < 0:
                first = table.began // -window * -window
            self._check(state, group, first, end)

    def _check(self, state: _Slot, group: int, first: int, end: int) -> None:
        """Check that a group has the KV of the request's own prefix at these positions."""
        table, size = self._tables[state.request_id], self._sizes[group]
        blocks = table.blocks[group][first // size : -(-end // size)]
        seen = self._memory[blocks, :size].reshape(-1)[first % size :][: end - first]
        expected = np.array(state.digests[first:end], np.uint64) ^ np.uint64(group)
        expected[max(0, table.num_exact - first) :] ^= np.uint64(table.own)
        assert np.array_equal(seen, expected), f"{state.request_id} attends to KV that is not its own prefix"


def _of_kind(copies: StepCopies | None, *, states: bool) -> StepCopies | None:
    """Return the jobs for KV blocks, or those for checkpoints."""
    if copies is None:
        return None
    before, after = (tuple(job for job in jobs if job.states == states) for jobs in (copies.before, copies.after))
    return msgspec.structs.replace(copies, before=before, after=after)

"""The running requests, as numpy columns indexed by slot, so that a step costs a few array operations."""

from typing import Any

import numpy as np

from quire.contracts.request import Request
from quire.contracts.step import I32, MAX_VERIFY_ROWS

I64 = np.ndarray[Any, np.dtype[np.int64]]


class RunningTable:
    """Running requests, as arrays with a row per slot.

    planned      number of tokens whose KV is computed or planned; for a decoding slot, `upper_bound` - 1
    confirmed    number of prompt tokens and collected output tokens
    upper_bound  `confirmed` plus all tokens that the steps in flight may add; at most `end`
    in_flight    steps that sample for the slot, planned and not yet collected
    goal         length at admission; the slot computes these tokens in chunks (prefill), then it decodes
    end          length in tokens at which the request is finished
    most_drafts  maximum number of drafts that a step verifies for the slot
    drafts       [num_slots, 1 + k] drafts of the slot's request: made, and accepted as first of a run, as second, ...
                 [num_slots, 0] without speculation
    told         tokens that all stages of a pipeline with drafts know
    ahead        [num_slots, k] drafts behind the confirmed tokens, of a pipeline's last stage; `num_ahead` of each slot
    masked       True: the slot's rows wait for grammar masks, so its drafts come from the host
    """

    def __init__(self, num_slots: int, num_drafts: int = 0) -> None:
        self.num_slots = num_slots
        self.requests: list[Request | None] = [None] * num_slots
        self.planned, self.confirmed, self.upper_bound, self.in_flight, self.goal, self.end, self.handle = (
            np.zeros(num_slots, np.int32) for _ in range(7)
        )
        self.most_drafts = np.zeros(num_slots, np.int32)
        self.drafts = np.zeros((num_slots, 1 + num_drafts if num_drafts else 0), np.int32)
        self.told, self.num_ahead = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        self.ahead = np.zeros((num_slots, num_drafts), np.int32)
        self._priority, self._arrival = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        self.masked = np.zeros(num_slots, bool)
        self._free = list(range(num_slots - 1, -1, -1))
        self._active: list[int] = []
        self._order: I32 | None = None
        self.version = 0  # changes with membership, so that per-batch lists can be reused while it does not

    def __len__(self) -> int:
        return len(self._active)

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def order(self) -> I32:
        """Return the active slots in the order of service: by priority, then by arrival."""
        if self._order is None:
            active = np.array(self._active, np.int32)  # nearly in order already, which makes sorting fast
            self._order = active[np.lexsort((self._arrival[active], self._priority[active]))]
        return self._order

    def enter(self, request: Request, computed: int, by_priority: bool) -> int:
        """Give `request` a free slot and return the slot. The KV of its first `computed` tokens exists already.

        by_priority   True: `order` respects the request's priority; False: it ignores priorities
        """
        slot = self._free[-1]
        self.planned[slot] = computed
        self.confirmed[slot] = self.upper_bound[slot] = self.goal[slot] = len(request.tokens)
        self.in_flight[slot] = self.num_ahead[slot] = 0
        self.told[slot] = len(request.tokens)
        self.drafts[slot] = request.drafts or 0
        self.end[slot] = request.end
        self.handle[slot] = request.new.handle
        self.masked[slot] = request.new.grammar is not None
        asked = MAX_VERIFY_ROWS if request.new.num_drafts is None else request.new.num_drafts
        self.most_drafts[slot] = min(asked, MAX_VERIFY_ROWS)
        self._priority[slot] = request.new.priority if by_priority else 0
        self._arrival[slot] = request.arrival
        self.requests[slot] = request  # from here on it holds the slot; nothing below fails
        request.slot = slot
        self._active.append(self._free.pop())
        self._changed()
        return slot

    def leave(self, request: Request) -> int:
        """Free the request's slot and return the slot. `request.in_flight` then counts its steps not yet collected."""
        slot = request.slot
        assert self.requests[slot] is request
        request.in_flight = int(self.in_flight[slot])
        request.drafts = tuple(self.drafts[slot].tolist())
        request.slot = -1
        self.requests[slot] = None
        self._active.remove(slot)
        self._free.append(slot)
        self._changed()
        return slot

    def active(self) -> list[Request]:
        """Return the running requests, in no particular order."""
        return [r for r in (self.requests[s] for s in self._active) if r is not None]

    def check(self) -> None:
        """Assert that every slot is either free or held by a running request with this slot."""
        assert sorted(self._free + self._active) == list(range(self.num_slots))
        for slot in self._active:
            request = self.requests[slot]
            assert request is not None and request.slot == slot
            bound = self.upper_bound[slot]
            assert self.confirmed[slot] == len(request.tokens) and bound <= request.end
            assert bound >= self.confirmed[slot] + self.in_flight[slot] and (bound == self.confirmed[slot]) == (
                self.in_flight[slot] == 0
            ), "the bound is not that of the steps in flight"
            assert 0 <= self.planned[slot] <= bound
            assert self.planned[slot] < self.goal[slot] or self.planned[slot] == max(self.goal[slot], bound - 1)
        assert all(self.requests[slot] is None for slot in self._free)

    def _changed(self) -> None:
        self._order = None
        self.version += 1

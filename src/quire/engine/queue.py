"""Queue of requests that wait for a slot, first come first served or by priority, with a limit."""

import heapq

from quire.contracts.errors import InvalidParameter, QueueFull
from quire.contracts.request import Request, RequestState

SLACK = 64  # entries of ended requests that may always stay in a heap


def check_fits(places: int, bound: int, num_slots: int, param: str) -> None:
    """Raise `InvalidParameter` about `param` when a request for `places` completions can never fit.

    bound       maximum number of completions that wait
    num_slots   maximum number of completions that run
    """
    if places > bound + num_slots:
        raise InvalidParameter(
            f"{places} completions in one request never fit: at most {bound + num_slots} do (max_num_seqs={num_slots} "
            f"and max_waiting={bound}); ask for fewer at once, or start the engine with a higher max_waiting.",
            param=param,
        )


class WaitingQueue:
    """Queue of waiting requests by (priority, arrival). A preempted request keeps its arrival and so its place."""

    def __init__(self, by_priority: bool, bound: int | None, num_slots: int) -> None:
        self._by_priority = by_priority
        self._bound = bound
        self._num_slots = num_slots
        self._heap: list[tuple[int, int, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_room(self, places: int, num_blocked: int, num_free: int) -> None:
        """Raise `QueueFull` when `places` new requests exceed max_waiting and the free slots together.

        num_blocked   requests that wait outside of this queue and count against max_waiting: those in
                      `RequestState.BLOCKED`, and those of other replicas
        num_free      free slots; each takes one request
        Raises `InvalidParameter` when `places` exceeds max_waiting and all slots: trying again cannot help.
        """
        if self._bound is None or not places:
            return
        check_fits(places, self._bound, self._num_slots, "n")
        waiting = self._size + num_blocked
        if waiting + places > self._bound + num_free:
            raise QueueFull(
                f"{waiting} requests are waiting already (max_waiting={self._bound}) and {places} more do not fit; "
                "try again later."
            )

    def backlog(self, most: int) -> int:
        """Return the tokens of all waiting requests together. Counting stops when the sum exceeds `most`."""
        total = 0
        for _, _, request in self._heap:
            if request.state is RequestState.WAITING and (total := total + len(request.tokens)) > most:
                break
        return total

    def push(self, request: Request) -> None:
        """Add a WAITING request. There is no limit here: `check_room` refuses new requests."""
        priority = request.new.priority if self._by_priority else 0
        heapq.heappush(self._heap, (priority, request.arrival, request))
        self._size += 1

    def peek(self) -> Request | None:
        """Return the request to be admitted next; None when none waits."""
        while self._heap and self._heap[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._heap)  # this request ended while waiting
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request that `peek` returned."""
        self._size -= 1
        return heapq.heappop(self._heap)[2]

    def drop(self, request: Request) -> None:
        """Stop counting a request that ended while it waited in this queue. `peek` skips its entry."""
        assert request.state is RequestState.FINISHED
        self._size -= 1
        if len(self._heap) > 2 * self._size + SLACK:  # entries that ended deep in the heap would pile up
            self._heap = [entry for entry in self._heap if entry[2].state is RequestState.WAITING]
            heapq.heapify(self._heap)

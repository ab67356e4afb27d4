"""Queue of requests that wait for a slot: lines that are served in turn, each first come first served or by priority.

A line is an API key's; with fewer than two keys there is one line. The line comes next that has paid least (start-time
fair queueing): it pays for tokens, divided by its weight, of a prompt when the request leaves the queue, of the output
when the request ends; cached tokens are paid back. A line that comes back begins at the time of the others.
"""

import heapq

from quire.contracts.errors import QueueFull
from quire.contracts.request import Request, RequestState, check_fits

SLACK = 64  # entries of ended requests that may always stay in a heap


class _Line:
    """Waiting requests by (priority, arrival), `num` without ended ones. paid: virtual time; turn: its valid entry."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Request]] = []
        self.num, self.paid = 0, 0.0
        self.turn: _Turn | None = None


_Turn = tuple[int, float, int, _Line]  # priority of the first request, what the line has paid, number of the entry


class WaitingQueue:
    """Queue of waiting requests. In a line a preempted request keeps its arrival and so its place."""

    def __init__(self, by_priority: bool, bound: int | None, num_slots: int) -> None:
        self._by_priority = by_priority
        self._bound = bound
        self._num_slots = num_slots
        self._lines: dict[str, _Line] = {}
        self._turns: list[_Turn] = []  # heap; entries that are no longer their line's `turn` are skipped
        self._num_turns = self._size = 0
        self._now = 0.0  # virtual time: what the line had paid that was served last

    def __len__(self) -> int:
        return self._size

    def check_room(self, places: int, num_blocked: int, num_free: int, line: str = "") -> None:
        """Raise `QueueFull` when `places` new requests exceed max_waiting and the free slots together. A line that has
        requests that no free slot takes may have as many as it leaves free for others.

        num_blocked   requests that wait outside of this queue and count against max_waiting: those in
                      `RequestState.BLOCKED`, and those of other replicas
        num_free      free slots; each takes one request
        Raises `InvalidParameter` when `places` exceeds max_waiting and all slots: trying again cannot help.
        """
        if self._bound is None or not places:
            return
        check_fits(places, self._bound, self._num_slots, "n")
        waiting = self._size + num_blocked
        room = self._bound + num_free - waiting
        own = self._lines[line].num - num_free if line and line in self._lines else 0  # free slots take the first ones
        if places > room:
            raise QueueFull(
                f"{waiting} requests are waiting already (max_waiting={self._bound}) and {places} more do not fit; "
                "try again later."
            )
        if own > 0 and own + places > room:
            raise QueueFull(
                f"{own} requests of this API key are waiting already, and a key leaves as many places of the queue "
                f"(max_waiting={self._bound}) to others: {places} more do not fit; try again later."
            )

    def backlog(self, most: int) -> int:
        """Return the tokens of all waiting requests together. Counting stops when the sum exceeds `most`."""
        total = 0
        for turn in self._turns:
            for _, _, request in turn[3].heap if turn is turn[3].turn else ():
                if request.state is RequestState.WAITING and (total := total + len(request.tokens)) > most:
                    return total
        return total

    def push(self, request: Request) -> None:
        """Add a WAITING request. There is no limit here: `check_room` refuses new requests."""
        line = self._lines.setdefault(request.new.account.line, _Line())
        if not line.heap:
            line.paid = max(line.paid, self._now)
        entry = (request.new.priority if self._by_priority else 0, request.arrival, request)
        heapq.heappush(line.heap, entry)
        line.num += 1
        self._size += 1
        if line.heap[0] is entry:
            self._line_up(line)

    def peek(self) -> Request | None:
        """Return the request to be admitted next; None when none waits."""
        while self._turns:
            line = self._turns[0][3]
            if line.turn is not self._turns[0]:
                heapq.heappop(self._turns)
            elif line.heap[0][2].state is RequestState.WAITING:
                return line.heap[0][2]
            else:
                heapq.heappop(line.heap)  # this request ended while waiting
                self._line_up(line)
        return None

    def pop(self) -> Request:
        """Remove and return the request that `peek` returned."""
        line = self._turns[0][3]
        self._size -= 1
        line.num -= 1
        self._now = max(self._now, line.paid)
        request = heapq.heappop(line.heap)[2]
        self._line_up(line)
        self.pay(request, len(request.tokens))
        return request

    def pay(self, request: Request, num_tokens: int) -> None:
        """Let a request's line pay for this many tokens of it in all, with those that it paid for already."""
        if name := request.new.account.line:  # one line owes nothing to others
            line = self._lines[name]
            line.paid += (num_tokens - request.num_served) / request.new.account.weight
            request.num_served = num_tokens
            self._line_up(line)

    def drop(self, request: Request) -> None:
        """Stop counting a request that ended while it waited in this queue. `peek` skips its entry."""
        assert request.state is RequestState.FINISHED
        line = self._lines[request.new.account.line]
        self._size -= 1
        line.num -= 1
        if len(line.heap) > 2 * line.num + SLACK:  # entries that ended deep in the heap would pile up
            line.heap = sorted(entry for entry in line.heap if entry[2].state is RequestState.WAITING)
            self._line_up(line)

    def _line_up(self, line: _Line) -> None:
        """Put a line behind those that have paid less, after a change of its first request or of what it has paid."""
        self._num_turns += 1
        line.turn = (line.heap[0][0], line.paid, self._num_turns, line) if line.heap else None
        if line.turn is not None:
            heapq.heappush(self._turns, line.turn)

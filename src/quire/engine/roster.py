"""The live requests: waiting, blocked and running, with their slots and blocks."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from quire.contracts.request import BlockReason, NewRequest, Request, RequestState
from quire.engine.adapters import AdapterSlots
from quire.engine.queue import WaitingQueue
from quire.engine.table import RunningTable
from quire.kv.allocator import KVAllocator
from quire.kv.blend import ChunkIndex
from quire.kv.hashing import KeyChain, Tags
from quire.kv.states import StateCopy
from quire.kv.store import KVStore

LOG = logging.getLogger("quire")
MOST_FETCHES = 4  # of an admission: blocks of a disk come in two steps, and others may leave meanwhile


class Roster:
    """The live requests of an engine core. Adds, moves and removes requests; plans nothing.

    table, queue, allocator   running requests, waiting requests, and the KV blocks of running requests
    store         the tiers of KV blocks below the device, or None
    chunks        finds KV of parts of prompts that were cached alone; None: no prompt reuses it
    adapters      slots of adapters; None: requests name none
    num_blocked   requests that wait for their grammar, for their adapter, for KV blocks of other tiers or, with n > 1,
                  for the prompt of completion 0
    released      slots that running requests gave back since the last plan
    preempted     handles of preempted requests, until the next outputs report them
    on_move       functions to call with every live request that came to another state, and its state before
    keeps         True: the prefix cache keeps the blocks of ended requests. False (prefix caching is off): it forgets
                  them, so that the next request writes to the same memory; only completions of one prompt and resumed
                  requests find blocks
    """

    def __init__(
        self,
        table: RunningTable,
        queue: WaitingQueue,
        allocator: KVAllocator,
        root_key: bytes,
        store: KVStore | None = None,
        *,
        chunks: ChunkIndex | None = None,
        keeps: bool = True,
    ) -> None:
        self.table, self.queue, self.allocator, self.store = table, queue, allocator, store
        self.chunks = chunks
        self.adapters: AdapterSlots | None = None
        self.num_blocked = 0
        self.released: list[int] = []
        self.preempted: list[int] = []
        self.on_move: list[Callable[[Request, RequestState], None]] = []
        self._root, self._keeps = root_key, keeps
        self._completions = Counter[int]()  # handle of completion 0 -> live completions of its prompt, unless `keeps`
        self._chains: dict[int, KeyChain] = {}
        self._children: dict[int, dict[int, Request]] = {}  # parent's handle -> blocked children by handle
        self._compiling: set[int] = set()  # handles of requests whose grammar is not compiled yet
        self._broken: list[Request] = []
        self._arrivals = 0

    def add(self, new: NewRequest, tags: Tags, parent: Request | None, places: int = 1, beside: int = 0) -> Request:
        """Queue a new request and return its record. It is blocked until the whole prompt of `parent` is planned.

        tags     salt, tenant and other values that its prefix-cache keys depend on, see `KeyChain`
        places, beside   as in `EngineCore.add`
        """
        if new.parent is None:
            self.queue.check_room(places, self.num_blocked + beside, self.table.num_free, new.account.line)
        request = Request(new, self._arrivals)
        self._arrivals += 1
        shared = new.transfer
        private = None if shared is None or shared.private < 0 else (shared.private, shared.name)
        chain = KeyChain(self._root, self.allocator.block_size, request.tokens, tags, private)
        if new.grammar is not None:
            self._compiling.add(new.handle)
        if parent is not None and not self._prompt_planned(parent):
            request.to(RequestState.BLOCKED, BlockReason.PARENT)
            self._children.setdefault(parent.new.handle, {})[new.handle] = request
            self.num_blocked += 1
        else:
            self._line_up(request)
        self._chains[new.handle] = chain
        if self.chunks is not None and new.reused.parts:
            self.chunks.add(new.handle, chain, new.reused.parts)
        if not self._keeps:
            self._completions[_family(request)] += 1
        if self.store is not None and new.transfer is not None:
            self.store.sharing.expect(new, chain)
        return request

    def remove(self, request: Request, *, distrust: bool = False, whole: bool = False) -> None:
        """End a request, whether it waits or runs, and free its slot and blocks.

        distrust   True: its blocks may hold wrong KV and are removed from the prefix cache
        whole      True: it came to its end, so that another engine may go on with its blocks
        """
        before, blocked_on = request.state, request.blocked_on
        if self.store is not None and (transfer := request.new.transfer) is not None:
            self.store.sharing.settle(request.new.handle)
            if whole and before is RequestState.RUNNING and not transfer.address:
                num_blocks, chain = int(self.allocator.published[request.slot]), self._chains[request.new.handle]
                self.store.sharing.keep(transfer.name, chain, num_blocks, request.num_prompt)
        if before is RequestState.RUNNING:
            self._keep_state(request, sound=not distrust)
            (self.allocator.forget if distrust else self.allocator.free)(request.slot)
            self.released.append(self.table.leave(request))
        request.to(RequestState.FINISHED)
        if request.num_served:
            self.queue.pay(request, 0 if request.num_cached < 0 else len(request.tokens) - request.num_cached)
        if before is RequestState.WAITING:
            self.queue.drop(request)
        if distrust and (before is not RequestState.RUNNING or request.origins):
            # It was preempted and failed in a step that was still in flight, or blocks from other tiers may be wrong.
            self.allocator.withdraw(self._chains[request.new.handle])
        if self.store is not None and blocked_on is BlockReason.REMOTE_KV:
            self.store.forget(request.new.handle)
        if self.adapters is not None:
            self.adapters.leave(request)
        if before is RequestState.BLOCKED:
            self.num_blocked -= 1
            if blocked_on is BlockReason.PARENT:
                assert request.new.parent is not None
                del self._children[request.new.parent][request.new.handle]
        self._compiling.discard(request.new.handle)
        self.unblock_children(request)
        chain = self._chains.pop(request.new.handle)
        if self.chunks is not None:
            self.chunks.forget(request.new.handle)
        if not self._keeps:
            self._forget(request, chain)

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue; its tokens are recomputed later."""
        self._keep_state(request, sound=True)
        self.allocator.free(request.slot)
        self.released.append(self.table.leave(request))
        request.to(RequestState.WAITING)
        request.num_preemptions += 1
        request.num_fetches = 0
        self.preempted.append(request.new.handle)
        self.queue.push(request)
        self.tell(request, RequestState.RUNNING)

    def _keep_state(self, request: Request, *, sound: bool) -> None:
        """Let others find the last copy of a running request's state. sound: False if its results are invalid."""
        if self.allocator.states is not None:
            known = int(self.table.confirmed[request.slot]) - 1  # the state after the newest token is not known yet
            self.allocator.states.leave(request.slot, self._chains[request.new.handle], known, sound=sound)

    def compiled(self, request: Request) -> None:
        """Record that the request's grammar is compiled. The request may run when nothing else blocks it."""
        self._compiling.remove(request.new.handle)
        if request.blocked_on is BlockReason.GRAMMAR:
            self.num_blocked -= 1
            request.to(RequestState.WAITING)
            self._line_up(request)
            self.tell(request, RequestState.BLOCKED)

    def await_blocks(self, request: Request) -> None:
        """Take the first request of the queue out of it, until KV blocks of other tiers are on the device."""
        self.queue.pop()
        request.to(RequestState.BLOCKED, BlockReason.REMOTE_KV)
        request.num_fetches += 1
        self.num_blocked += 1
        self.tell(request, RequestState.WAITING)

    def came(self, request: Request, *, again: bool = True) -> None:
        """Queue a request that waited for KV blocks of other tiers, or for its adapter.

        again   False: it waits for no more blocks
        """
        self.num_blocked -= 1
        request.num_fetches = request.num_fetches if again else MOST_FETCHES
        request.to(RequestState.WAITING)
        self.queue.push(request)
        self.tell(request, RequestState.BLOCKED)

    def prompt_planned(self, request: Request) -> None:
        """Queue the children of a request whose whole prompt is planned; with states, when it is computed."""
        if self.allocator.states is None:
            self.unblock_children(request)

    def states_came(self, copies: Iterable[StateCopy], failed: frozenset[int], computed: Iterable[Request]) -> None:
        """Make the copies of states of a step known, whose result has come.

        failed     slots whose results are invalid
        computed   requests whose prompt the step has computed to its end
        """
        if self.allocator.states is not None:
            self.allocator.states.came(copies, failed)
            for request in computed:
                self.unblock_children(request)

    def unblock_children(self, parent: Request) -> None:
        """Queue the children of `parent`. Call this when they can share its whole prompt, or the parent ends."""
        for child in self._children.pop(parent.new.handle, {}).values():
            self.num_blocked -= 1
            child.to(RequestState.WAITING)
            self._line_up(child)
            self.tell(child, RequestState.BLOCKED)

    def tell(self, request: Request, before: RequestState) -> None:
        """Call `on_move`."""
        for call in self.on_move:
            call(request, before)

    def chain(self, request: Request) -> KeyChain:
        """Return the prefix-cache keys of the request's blocks."""
        return self._chains[request.new.handle]

    def publish(self, request: Request, num_tokens: int) -> None:
        """Index the full blocks among the request's first `num_tokens` tokens, so that other requests can share them.

        The KV of these tokens must be computed already, or by the plan that is being made.
        """
        full = num_tokens // self.allocator.block_size
        self.allocator.publish(request.slot, self._chains[request.new.handle], full)

    def fail(self, request: Request) -> None:
        """End a request whose bookkeeping raised an exception, and log the exception. Call this in the handler.

        `take_broken` returns the request. Its published blocks may never be computed, so they are withdrawn.
        """
        LOG.exception("request %s failed; the others go on", request.new.request_id)
        if request.state is RequestState.WAITING and request.slot >= 0:  # its admission broke off; not in any plan
            self._keep_state(request, sound=False)
            if self.allocator.num_blocks(request.slot):
                self.allocator.forget(request.slot)
            self.allocator.loans.forget(request.slot)
            self.table.leave(request)
        self.remove(request, distrust=request.state is RequestState.RUNNING)
        self._broken.append(request)

    def take_broken(self) -> list[Request]:
        """Return the requests that `fail` has ended since the last call."""
        broken, self._broken = self._broken, []
        return broken

    def check(self) -> None:
        """Assert every invariant of table and pool, and that only running requests hold slots and blocks."""
        self.table.check()
        if self.allocator.states is not None:
            held = self.store.held_states() if self.store is not None else ()
            self.allocator.states.check([request.slot for request in self.table.active()], held)
        self.allocator.check(tuple(self.store.held()) if self.store is not None else ())
        if self.store is not None:
            self.store.check()
        for request in self.table.active():
            assert request.state is RequestState.RUNNING
            assert self.allocator.capacity[request.slot] >= self.table.planned[request.slot]
        idle = [s for s in range(self.table.num_slots) if self.table.requests[s] is None]
        assert not self.allocator.capacity[idle].any()

    def _line_up(self, request: Request) -> None:
        """Queue a WAITING request, or block it until its grammar is compiled, then until its adapter is there."""
        if request.new.handle in self._compiling:
            request.to(RequestState.BLOCKED, BlockReason.GRAMMAR)
            self.num_blocked += 1
        elif self.adapters is not None and not self.adapters.take(request):
            request.to(RequestState.BLOCKED, BlockReason.ADAPTER)
            self.num_blocked += 1
        else:
            self.queue.push(request)

    def _forget(self, request: Request, chain: KeyChain) -> None:
        """Remove the blocks of an ended request from the prefix cache; those of the prompt with its last completion."""
        family = _family(request)
        self._completions[family] -= 1
        shared = request.num_prompt // self.allocator.block_size
        if not self._completions[family]:
            del self._completions[family]
            shared = 0
        self.allocator.withdraw(chain, shared)

    def _prompt_planned(self, parent: Request) -> bool:
        if parent.state is RequestState.RUNNING and self.allocator.states is None:
            return bool(self.table.planned[parent.slot] >= parent.num_prompt)
        return parent.state is RequestState.FINISHED or len(parent.tokens) > parent.num_prompt


def _family(request: Request) -> int:
    """Return the handle of completion 0 of the request's prompt."""
    return request.new.handle if request.new.parent is None else request.new.parent

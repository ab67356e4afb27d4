"""Adapters (LoRA) of an engine core: which of them are in slots of the device, and which requests wait for one.

A request holds its adapter from the moment when it may be scheduled to its end, preempted or not. A slot whose adapter
nobody holds keeps it until another adapter needs the slot; the least recently used one leaves first. If all slots are
held, the one that was taken least recently is closed: later requests for its adapter wait, so that its slot becomes
free, and no adapter can keep others out for ever. Knows requests and slots, nothing of matrices.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from quire.contracts.adapters import Adapter, AdapterLoad, AdapterLoaded, AdapterStats
from quire.contracts.errors import RequestFailed
from quire.contracts.request import Request

FAILED = "adapter"  # code of the error of requests whose adapter cannot be loaded


class _Resident:
    """An adapter in a slot. holders: handles of the requests that hold it;  closed: see the module"""

    def __init__(self, slot: int, adapter: Adapter) -> None:
        self.slot, self.adapter = slot, adapter
        self.holders: set[int] = set()
        self.closed = False


class _Loading(NamedTuple):
    slot: int
    adapter: Adapter


class AdapterSlots:
    """The slots of a device, and the requests that wait for an adapter in one.

    num_slots   slots of the device;  num_held  adapters that host memory has room for
    check       raises `AdapterError` for an adapter that does not fit the model
    """

    def __init__(self, num_slots: int, num_held: int, check: Callable[[Adapter], None] = lambda adapter: None) -> None:
        self.check = check
        self._num_held = num_held
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # by digest, least recently taken first
        self._waiting: OrderedDict[str, dict[int, Request]] = OrderedDict()  # by digest, longest waiting first
        self._loading: dict[int, _Loading] = {}  # by number of the job
        self._jobs: list[AdapterLoad] = []  # for the next plan
        self._held: OrderedDict[str, None] = OrderedDict()  # digests in host memory, least recently used first
        self._num_jobs = 0
        self._loads = self._reads = self._failed = 0

    @property
    def busy(self) -> bool:
        """True while an adapter is loaded, or is to be."""
        return bool(self._loading)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an adapter."""
        return sum(map(len, self._waiting.values()))

    def slot_of(self, request: Request) -> int:
        """Return the slot of the adapter that a request holds; -1: it names none."""
        adapter = request.new.adapter
        return -1 if adapter is None else self._resident[adapter.digest].slot

    def has(self, adapter: Adapter) -> bool:
        """Return True if the adapter is in a slot."""
        return adapter.digest in self._resident

    def take(self, request: Request) -> bool:
        """Let a request hold its adapter. Returns False if the request must wait for it; then `finished` tells."""
        adapter, handle = request.new.adapter, request.new.handle
        if adapter is None:
            return True
        found = self._resident.get(adapter.digest)
        if found is not None and (not found.closed or handle in found.holders):
            found.holders.add(handle)
            self._resident.move_to_end(adapter.digest)
            return True
        self._waiting.setdefault(adapter.digest, {})[handle] = request
        self._assign()
        return False

    def leave(self, request: Request) -> None:
        """Forget a request that ends, whether it holds its adapter or waits for it."""
        adapter, handle = request.new.adapter, request.new.handle
        if adapter is None:
            return
        if (waiting := self._waiting.get(adapter.digest)) is not None:
            waiting.pop(handle, None)
            if not waiting:
                del self._waiting[adapter.digest]
        if (found := self._resident.get(adapter.digest)) is not None and handle in found.holders:
            found.holders.discard(handle)
            self._assign()

    def take_jobs(self) -> tuple[AdapterLoad, ...]:
        """Return the loads for the plan that is made."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def finished(self, reports: Iterable[AdapterLoaded]) -> tuple[list[Request], list[tuple[Request, RequestFailed]]]:
        """Apply reports of loads. Return the requests that hold their adapter now, and those that cannot have it."""
        ready, failed = list[Request](), list[tuple[Request, RequestFailed]]()
        for report in reports:
            slot, adapter = self._loading.pop(report.id)
            waiting = self._waiting.pop(adapter.digest, {})
            if report.error:
                self._failed += 1
                self._free.append(slot)  # the adapter counts as held: other ranks may have read it
                message = f"the adapter {adapter.name!r} could not be loaded: {report.error}"
                failed += [(request, RequestFailed(message, code=FAILED)) for request in waiting.values()]
                continue
            self._loads, self._reads = self._loads + 1, self._reads + report.read
            self._resident[adapter.digest] = found = _Resident(slot, adapter)
            found.holders.update(waiting)
            ready += waiting.values()
        self._assign()
        return ready, failed

    def stats(self, *, alive: bool = True) -> AdapterStats:
        """Return the adapters in slots, and the counts since the start. alive: False for an engine that ended"""
        counts = AdapterStats(loads=self._loads, reads=self._reads, failed=self._failed)
        if not alive:
            return counts
        resident = Counter[str]()
        for one in self._resident.values():
            resident[one.adapter.name] += len(one.holders)  # a name that was loaded anew has two contents
        waiting = self.num_waiting
        return msgspec.structs.replace(counts, slots=self._num_slots, resident=dict(resident), waiting=waiting)

    def check_slots(self, live: Iterable[Request]) -> None:
        """Assert that each slot has one use, and that exactly the live requests hold adapters or wait for them."""
        used = [one.slot for one in self._resident.values()] + [one.slot for one in self._loading.values()]
        assert sorted(used + self._free) == list(range(self._num_slots)), "a slot has no use, or two"
        held = {handle for one in self._resident.values() for handle in one.holders}
        waiting = {handle for some in self._waiting.values() for handle in some}
        named = {request.new.handle for request in live if request.new.adapter is not None}
        assert not held & waiting and held | waiting <= named, "a request that ended holds an adapter"
        assert len(self._held) <= max(self._num_held, self._num_slots), "host memory has too many adapters"

    def _assign(self) -> None:
        """Give slots to the adapters that wait for one, and close a slot if all are held."""
        loading = {one.adapter.digest for one in self._loading.values()}
        for digest, waiting in self._waiting.items():
            if digest in loading or digest in self._resident:  # a closed one comes again when its holders have ended
                if digest in loading or self._resident[digest].holders:
                    continue
                found = self._resident.pop(digest)
                self._free.append(found.slot)
            if (slot := self._free_slot()) is None:
                return
            adapter = next(iter(waiting.values())).new.adapter
            assert adapter is not None
            self._begin(slot, adapter)

    def _free_slot(self) -> int | None:
        """Return a slot that nobody uses. None: all are held, and one is closed."""
        if self._free:
            return self._free.pop()
        for digest, one in self._resident.items():
            if not one.holders:
                del self._resident[digest]
                return one.slot
        if self._resident and not any(one.closed for one in self._resident.values()):
            next(iter(self._resident.values())).closed = True
        return None

    def _begin(self, slot: int, adapter: Adapter) -> None:
        self._num_jobs += 1
        self._held[adapter.digest] = None
        self._held.move_to_end(adapter.digest)
        used = {*self._resident, *(one.adapter.digest for one in self._loading.values()), adapter.digest}
        spare = [digest for digest in self._held if digest not in used]
        forget = tuple(spare[: max(0, len(self._held) - self._num_held)])
        for digest in forget:
            del self._held[digest]
        self._loading[self._num_jobs] = _Loading(slot, adapter)
        self._jobs.append(AdapterLoad(id=self._num_jobs, slot=slot, adapter=adapter, forget=forget))


def summed(parts: Sequence[AdapterStats]) -> AdapterStats:
    """Return the adapters and counts of several replicas."""
    resident = Counter[str]()
    for one in parts:
        for name, count in one.resident.items():
            resident[name] += count
    counts = {
        name: sum(getattr(one, name) for one in parts) for name in ("slots", "waiting", "loads", "reads", "failed")
    }
    return AdapterStats(resident=dict(resident), **counts)

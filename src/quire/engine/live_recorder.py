"""The recorder of the live view: what a core does in each step, and what becomes of its requests.

A core has one only while somebody watches (`EngineCore.watch`). A step costs a few microseconds here: what the step has
made anyway is kept as it is, and becomes records when a frame is made (`procs/live_feed.py` says when).
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import NamedTuple

from quire.contracts.live import (
    LiveBlocks,
    LiveEngine,
    LiveEvent,
    LiveEventKind,
    LiveGroup,
    LiveMiss,
    LivePrefix,
    LiveQueue,
    LiveRequests,
    LiveStates,
    LiveStep,
    LiveSums,
    LiveTier,
)
from quire.contracts.output import StateStats, StepOutputs, StepStats, TierStats
from quire.contracts.request import FinishReason, Request, RequestState
from quire.contracts.step import I32, SAMPLE, U8, Tier
from quire.engine.plan_writer import InFlight
from quire.engine.scheduler import Scheduler
from quire.kv.census import census

MOST_STEPS = 64  # of a frame; earlier ones are only summed up
RING = 4096  # steps to remember until the next frame
MOST_EVENTS = 2048  # of a frame
MOST_WAITING = 128  # requests without a slot that a frame lists
MOST_ADAPTERS = 64  # names that a frame has
SHORT = "KV blocks are short"  # the only reason for which a request is preempted

Chunks = tuple[tuple[int, int, int, int], ...]  # as `LiveStep.chunks`
ChunkRows = tuple[I32, I32, I32, U8] | None  # the same in columns; None: the step has no chunks
Noted = tuple[float, int, LiveEventKind, int, int, str]  # time, handle, what, first, count, detail


class KeptStep(NamedTuple):
    """A confirmed step, as it is kept until the next frame. The times are those of `LiveStep`."""

    stats: StepStats
    at: float
    chunks: ChunkRows
    sampled: int
    launch_s: float
    device_s: float


class LiveRecorder:
    """Records the steps and the requests of a core until `frame` takes the records. One thread calls it.

    requests  live requests of the core by handle
    clock     seconds since 1970
    """

    def __init__(
        self, scheduler: Scheduler, requests: Mapping[int, Request], clock: Callable[[], float] = time.time
    ) -> None:
        self._scheduler, self._requests, self._clock = scheduler, requests, clock
        self._steps = deque[KeptStep](maxlen=RING)
        self._launched: dict[int, tuple[float, ChunkRows]] = {}  # step -> begin of its launch, and its chunks
        self._result_at = perf_counter()  # of the last step
        self._drafts = scheduler.drafts.totals  # of the last frame
        self._noted = deque[Noted](maxlen=MOST_EVENTS)
        self._num_noted = self._num_steps = 0
        self._misses: dict[str, LiveMiss] = {}

    # --- hooks: what happens ------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Record that a request was taken."""
        self._note(request, LiveEventKind.ARRIVED, count=request.num_prompt)
        if request.blocked_on is not None:
            self._note(request, LiveEventKind.BLOCKED, detail=request.blocked_on.value)

    def moved(self, request: Request, before: RequestState) -> None:
        """Record that a live request came to another state."""
        if request.state is RequestState.RUNNING:
            self._admitted(request)
        elif before is RequestState.RUNNING:
            self._note(request, LiveEventKind.PREEMPTED, count=len(request.tokens), detail=SHORT)
        elif request.blocked_on is not None:
            self._note(request, LiveEventKind.BLOCKED, detail=request.blocked_on.value)
        else:
            self._note(request, LiveEventKind.QUEUED)

    def ended(self, request: Request, reason: FinishReason, code: str) -> None:
        """Record the end of a request. code: cause of an abort, or code of an error; "" for none"""
        count = len(request.tokens) - request.num_prompt
        self._note(
            request, LiveEventKind.FINISHED, count=count, detail=f"{reason.value}: {code}" if code else reason.value
        )

    def submitted(self, planned: InFlight, began: float) -> None:
        """Record a step that was handed to the executor. began: time before, of `perf_counter`."""
        chunks: ChunkRows = None
        if planned.num_prefills:
            plan, table = planned.plan, self._scheduler.table
            slots, counts = plan.slots[plan.num_decodes :], plan.num_tokens[plan.num_decodes :]
            chunks = (table.handle[slots], table.planned[slots] - counts, counts, plan.outputs[plan.num_decodes :])
        self._launched[planned.plan.step] = (began, chunks)

    def confirmed(self, step: InFlight, outputs: StepOutputs, launch_s: float) -> None:
        """Record a step whose result was applied. launch_s: the part of its time in the executor before the result."""
        stats = outputs.stats
        result_at = perf_counter() - stats.finish_s
        began, chunks = self._launched.pop(step.plan.step, (self._result_at, None))
        device_s = result_at - max(began, self._result_at)
        self._result_at = result_at
        self._steps.append(KeptStep(stats, self._clock(), chunks, len(outputs.handles), launch_s, device_s))
        self._num_steps += 1

    # --- frames -------------------------------------------------------------------------------------------------

    def frame(self, replica: int) -> LiveEngine:
        """Return the state of the engine, and the records since the last frame."""
        total = self._num_steps
        steps, sums, chunks = self._told()
        sums.steps = total
        events, lost = self._happened(chunks)
        self._steps.clear()
        self._num_steps = 0
        store, states = self._scheduler.roster.store, self._scheduler.allocator.states
        blocks, held = self._blocks()
        queue, requests = self._live(held)
        stats = self._scheduler.admitter.stats()
        return LiveEngine(
            replica=replica,
            steps=steps,
            skipped=total - len(steps),
            sums=sums,
            queue=queue,
            blocks=blocks,
            prefix=LivePrefix(
                queries=stats.queries,
                hits=stats.hits,
                misses=self._misses,
                states=None if states is None else _states(stats.states, queue.running),
            ),
            tiers={} if store is None else _tiers(store.counters()),
            requests=requests,
            events=events,
            lost_events=lost,
        )

    def tenants(self) -> dict[int, str]:
        """Return handle -> tenant of the live requests that have one."""
        return {handle: one.new.account.tenant for handle, one in self._requests.items() if one.new.account.tenant}

    # --- inside -------------------------------------------------------------------------------------------------

    def _note(self, request: Request, what: LiveEventKind, *, first: int = 0, count: int = 0, detail: str = "") -> None:
        self._noted.append((self._clock(), request.new.handle, what, first, count, detail))
        self._num_noted += 1

    def _happened(self, chunks: list[LiveEvent]) -> tuple[list[LiveEvent], int]:
        """Return the events since the last frame in their order, and the number of those that are left out."""
        events = [
            LiveEvent(at=round(at, 6), handle=handle, what=what, first=first, count=count, detail=detail)
            for at, handle, what, first, count, detail in self._noted
        ]
        total = self._num_noted + len(chunks)
        if chunks:
            events = sorted(chunks + events, key=attrgetter("at"))[-MOST_EVENTS:]
        self._noted.clear()
        self._num_noted = 0
        return events, total - len(events)

    def _admitted(self, request: Request) -> None:
        first_time = request.num_preemptions == 0
        report = request.prefix if first_time else None
        missed = 0 if report is None else report.num_blocks - report.num_reused
        if report is not None:
            miss = self._misses.setdefault(report.why.value, LiveMiss())
            miss.requests += 1
            miss.blocks += missed
        reused = int(self._scheduler.table.planned[request.slot])
        why = "" if report is None else report.why.value
        self._note(request, LiveEventKind.ADMITTED, first=missed, count=reused, detail=why)
        if first_time and request.origins:
            for tier, count in Counter(one.tier for one in request.origins.values()).items():
                self._note(request, LiveEventKind.FETCHED, count=count, detail=tier.value)

    def _told(self) -> tuple[list[LiveStep], LiveSums, list[LiveEvent]]:
        """Return the last steps as records, the sums of all, and the events of their chunks."""
        steps, sums, events = deque[LiveStep](maxlen=MOST_STEPS), LiveSums(), list[LiveEvent]()
        for one in self._steps:
            chunks = _chunks(one.chunks)
            stats = one.stats
            drafts, self._drafts = _drafts(self._drafts, stats.drafts), stats.drafts
            times = (stats.schedule_s, one.launch_s, one.device_s, stats.execute_s - one.launch_s, stats.finish_s)
            plan_s, launch_s, device_s, collect_s, finish_s = [round(each, 6) for each in times]
            sums.prompt_tokens += stats.num_prefill_tokens
            sums.tokens += stats.num_tokens
            sums.sampled += one.sampled
            sums.drafts += drafts[0]
            sums.accepted += drafts[1]
            sums.plan_s += plan_s
            sums.launch_s += launch_s
            sums.device_s += device_s
            sums.collect_s += collect_s
            sums.finish_s += finish_s
            steps.append(
                LiveStep(
                    step=stats.step,
                    at=round(one.at, 6),
                    chunks=chunks,
                    decodes=stats.num_scheduled - stats.num_prefills,
                    drafts=drafts,
                    tokens=stats.num_tokens,
                    sampled=one.sampled,
                    plan_s=plan_s,
                    launch_s=launch_s,
                    device_s=device_s,
                    collect_s=collect_s,
                    finish_s=finish_s,
                )
            )
            events += _chunk_events(chunks, round(one.at - stats.finish_s, 6), stats.step)
        return list(steps), sums, events

    def _live(self, held: list[int]) -> tuple[LiveQueue, LiveRequests]:
        """Return the counts of live requests, and their columns. held: blocks of the running ones."""
        table, columns = self._scheduler.table, LiveRequests()
        order = table.order()
        slots = order.tolist()
        running = [request for slot in slots if (request := table.requests[slot]) is not None]
        columns.computed = table.planned[order].tolist()
        columns.tokens = table.confirmed[order].tolist()
        columns.blocks, columns.slot = held, slots
        columns.state = ["running"] * len(running)
        blocked, preempted, waiting, others = Counter[str](), 0, 0, list[Request]()
        for request in self._requests.values():
            if request.state is RequestState.RUNNING:
                continue
            others.append(request)
            if request.blocked_on is not None:
                blocked[request.blocked_on.value] += 1
            else:
                waiting += 1
                preempted += request.num_preemptions > 0
        shown = others[:MOST_WAITING]
        for request in shown:
            columns.state.append(_state(request))
            columns.slot.append(-1)
            columns.tokens.append(len(request.tokens))
            columns.computed.append(0)
            columns.blocks.append(0)
        every = running + shown
        named = Counter(one.new.adapter.name for one in running + others if one.new.adapter is not None)
        columns.handle = [request.new.handle for request in every]
        columns.id = [request.new.request_id for request in every]
        columns.prompt = [request.num_prompt for request in every]
        columns.cached = [request.num_cached for request in every]
        columns.preemptions = [request.num_preemptions for request in every]
        columns.more = len(others) - len(shown)
        queue = LiveQueue(
            running=len(running),
            waiting=waiting,
            preempted=preempted,
            waits_for=self._scheduler.admitter.waits_for if waiting else "",
            blocked=dict(blocked),
            adapters=dict(named.most_common(MOST_ADAPTERS)),
            num_preemptions=self._scheduler.num_preempted,
            slots=table.num_slots,
        )
        return queue, columns

    def _blocks(self) -> tuple[LiveBlocks, list[int]]:
        """Return the blocks of the device by kind, and the number that each running request holds, in their order."""
        allocator, pool, store = self._scheduler.allocator, self._scheduler.allocator.pool, self._scheduler.roster.store
        others = chain(allocator.loans.blocks(), () if store is None else store.held())
        counted = census(allocator, self._scheduler.table.order().tolist(), others)
        own, shared = (sum(column) for column in zip(*counted.groups, strict=True))
        groups = [
            LiveGroup(window=group.window, block_size=group.block_size, own=one[0], shared=one[1])
            for group, one in zip(allocator.groups, counted.groups, strict=True)
        ]
        blocks = LiveBlocks(
            total=pool.num_blocks,
            own=own,
            shared=shared,
            moving=pool.num_blocks - pool.num_free - own - shared,
            cached=pool.num_cached,
            free=pool.num_free - pool.num_cached,
            groups=tuple(groups),
        )
        return blocks, counted.held


def _state(request: Request) -> str:
    """Return the word of `LiveRequests.state` for a request without a slot."""
    if request.blocked_on is not None:
        return request.blocked_on.value
    return "preempted" if request.num_preemptions else "waiting"


def _chunks(rows: ChunkRows) -> Chunks:
    """Return the chunks of a step as `LiveStep.chunks`."""
    if rows is None:
        return ()
    handles, first, counts, outputs = rows
    columns = (handles, first, counts, outputs & SAMPLE)
    return tuple(zip(*[column.tolist() for column in columns], strict=True))


def _chunk_events(chunks: Chunks, at: float, step: int) -> Iterator[LiveEvent]:
    for handle, first, count, ends in chunks:
        yield LiveEvent(
            at=at,
            handle=handle,
            what=LiveEventKind.CHUNK,
            step=step,
            first=first,
            count=count,
            detail="ends" if ends else "",
        )


def _drafts(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, int]:
    """Return the drafts made and right between two `StepStats.drafts`."""
    if not now:
        return 0, 0
    return now[1] - before[1], sum(now[2:]) - sum(before[2:])


def _tiers(counters: Mapping[Tier, TierStats]) -> dict[Tier, LiveTier]:
    return {
        tier: LiveTier(
            blocks=one.num_blocks,
            used=one.num_used,
            loaded=one.num_loaded,
            loaded_bytes=one.loaded_bytes,
            loaded_s=one.loaded_seconds,
            stored=one.num_stored,
            stored_bytes=one.stored_bytes,
            stored_s=one.stored_seconds,
            failed=one.num_failed,
            dropped=one.num_dropped,
        )
        for tier, one in counters.items()
    }


def _states(stats: StateStats, rows: int) -> LiveStates:
    return LiveStates(
        rows=rows,
        total=stats.num_checkpoints,
        used=stats.num_used,
        taken=stats.taken,
        hits=stats.hits,
        cut=stats.cut,
        tiers=_tiers(stats.tiers),
    )

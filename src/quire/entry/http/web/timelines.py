"""Events in the lives of requests, as far as somebody watched; and what the HTTP process knows of a life itself."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from quire.contracts.live import LiveEvent, LiveEventKind, LiveFrame

MOST_REQUESTS = 1024
MOST_EVENTS = 512  # of a completion


class Timelines:
    """The last events of the last completions, by handle."""

    def __init__(self) -> None:
        self._events = OrderedDict[int, deque[LiveEvent]]()

    def take(self, frame: LiveFrame) -> None:
        """Add the events of a frame. Requests of which events were missed are forgotten, unless they have ended."""
        if frame.frame == 1 or any(engine.lost_events for engine in frame.engines):
            for handle in [handle for handle, kept in self._events.items() if not _ended(kept)]:
                del self._events[handle]
        for engine in frame.engines:
            for event in engine.events:
                kept = self._events.get(event.handle)
                if kept is None or event.what is LiveEventKind.ARRIVED:
                    kept = self._events[event.handle] = deque(maxlen=MOST_EVENTS)
                    self._events.move_to_end(event.handle)
                    kept.append(event)
                elif len(kept) == MOST_EVENTS:  # its beginning stays, so that it can be told from a life half seen
                    first = kept.popleft()
                    kept.popleft()
                    kept.appendleft(first)
                    kept.append(event)
                else:
                    kept.append(event)
        while len(self._events) > MOST_REQUESTS:
            self._events.popitem(last=False)

    def of(self, handles: Sequence[int]) -> list[LiveEvent] | None:
        """Return the events of a request's completions, in order; None unless they are known from the beginning."""
        found = [self._events.get(handle) for handle in handles]
        events = [event for kept in found if kept is not None for event in kept]
        begun = [kept is not None and kept[0].what is LiveEventKind.ARRIVED for kept in found]
        return sorted(events, key=lambda event: event.at) if begun and all(begun) else None


def timeline(record: Mapping[str, Any], timelines: Timelines) -> dict[str, Any]:
    """Return the timeline of a request from its record (`request_record`): docs/live.md."""
    events = timelines.of(record["handles"])
    if events is not None:
        last = told(record)[-1]
        if last.what is LiveEventKind.FINISHED and not any(event.what is last.what for event in events):
            events.append(last)  # the core's own comes with the next frame
        return {"request": record, "events": events, "watched": True, "unknown": None}
    return {"request": record, "events": told(record), "watched": False, "unknown": _unknown(record)}


def told(record: Mapping[str, Any]) -> list[LiveEvent]:
    """Return the events of a request that its record tells, at the times when the HTTP process heard of them."""
    handle, at = record["handles"][0], record["arrived"]
    events = [LiveEvent(at=at, handle=handle, what=LiveEventKind.ARRIVED, count=record["num_prompt"])]
    if record["queue_s"] is not None:
        at += record["queue_s"]
        report, origins = record["prefix"], record["fetched"]
        why, missed = ("", 0) if report is None else (report.why.value, report.num_blocks - report.num_reused)
        count = record["num_cached"]
        events.append(
            LiveEvent(at=at, handle=handle, what=LiveEventKind.ADMITTED, first=missed, count=count, detail=why)
        )
        for tier, blocks in Counter(one.tier.value for one in origins.values()).items():
            events.append(LiveEvent(at=at, handle=handle, what=LiveEventKind.FETCHED, count=blocks, detail=tier))
    if record["prefill_s"] is not None:
        at += record["prefill_s"]
        first, count = record["num_cached"], record["num_prompt"] - record["num_cached"]
        events.append(
            LiveEvent(at=at, handle=handle, what=LiveEventKind.CHUNK, first=first, count=count, detail="ends")
        )
    if record["state"] not in ("waiting", "running"):
        at, count = record["arrived"] + record["e2e_s"], record["num_output"]
        why = record["state"] + (f": {record['cause']}" if record["cause"] else "")
        events.append(LiveEvent(at=at, handle=handle, what=LiveEventKind.FINISHED, count=count, detail=why))
    return events


def _unknown(record: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Return the stretch of an unwatched life that may hide preemptions: from the first admission to the end, or None
    if the request lives. None without an admission."""
    if record["queue_s"] is None:
        return None
    end = None if record["state"] in ("waiting", "running") else record["arrived"] + record["e2e_s"]
    return record["arrived"] + record["queue_s"], end


def _ended(kept: Sequence[LiveEvent]) -> bool:
    return kept[-1].what is LiveEventKind.FINISHED

"""/debug/profile: some steps as a trace that Perfetto and chrome://tracing open, in the form of trace events.

    ?seconds=2   seconds to record: 0.05 to 30 (default: 2; 30 with `steps` alone)
    ?steps=20    steps to record: 1 to 1,000; the first limit ends it

The answer is the file: nothing stays on the server. One profile at a time. The requests in it are those of the caller's
key; names in it are those of functions, operators and kernels.
"""

import asyncio
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import error_json
from quire.entry.http.request_response import ClientGone, Exchange, Receive, Scope
from quire.entry.http.sse import Send
from quire.procs.step_profile import BUSY, PROFILE, STEPS, StepProfiled

SECONDS, MOST_SECONDS = 2.0, 30.0
MOST_STEPS = 1_000
FOREIGN = ("cross-site", "same-site")  # values of the header Sec-Fetch-Site
REFUSED = '{"refused"'
HEADERS = (("content-disposition", 'attachment; filename="quire-profile.json"'), ("cache-control", "no-store"))
DECODER = msgspec.json.Decoder(StepProfiled)
Event = dict[str, Any]


class ProfileRoute:
    """The profile of some steps, as an ASGI application: it notices a caller that leaves."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await exchange.body()
            if exchange.header(b"sec-fetch-site") in FOREIGN:
                words = "a page of another origin may not slow this server: open its own page."
                return await exchange.reply(error_json(403, words, "foreign_page"), status=403)
            seconds, steps = limits(scope.get("query_string", b"").decode("latin-1"))
            token = secrets.token_hex(8)
            asked = {"token": token, "seconds": seconds, "steps": steps}
            try:
                async with exchange.watch() as watch:
                    found = str(await self._engine.control(PROFILE, on=True, **asked))
                    watch.stop()
            except ClientGone:
                await self._engine.control(PROFILE, on=False, token=token)
                raise
            if found.startswith(REFUSED):
                words = "a profile, or a trace of a request, is being made already: try again when it is complete."
                return await exchange.reply(error_json(409, words, BUSY), status=409)
            records = self._engine.requests(caller_of(scope).tenant)
            body = await asyncio.to_thread(lambda: trace_events(DECODER.decode(found), records))
            await exchange.reply(body, headers=HEADERS)
        except ClientGone:
            return
        except Exception as error:  # the client always gets an answer
            await exchange.fail(error)


def limits(query: str) -> tuple[float, int]:
    """Return the seconds and the steps that a caller asks for. Raises `InvalidParameter`."""
    given = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    try:
        steps = int(given.get("steps", MOST_STEPS))
        seconds = float(given.get("seconds", MOST_SECONDS if "steps" in given else SECONDS))
    except ValueError:
        steps, seconds = 0, math.nan
    if not 1 <= steps <= MOST_STEPS:
        raise InvalidParameter(f"steps must be an integer in [1, {MOST_STEPS}].", param="steps")
    if not 0.05 <= seconds <= MOST_SECONDS:
        raise InvalidParameter(f"seconds must be a number in [0.05, {MOST_SECONDS:g}].", param="seconds")
    return seconds, steps


def trace_events(found: StepProfiled, records: Sequence[dict[str, Any]]) -> bytes:
    """Return a profile as JSON of trace events. `records`: of requests, as `request_record` makes them"""
    events = [*_of_requests(found, records)]
    for number, (part, slices) in enumerate(found.parts.items(), 2):
        events.append(_named("process_name", part, number))
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        facts, tracks = iter(found.facts), dict[str, int]()
        for track, name, begin, spent in slices:
            if track not in tracks:
                tracks[track] = len(tracks)
                events.append(_named("thread_name", track, number, tracks[track]))
            event = {"ph": "X", "name": name, "pid": number, "tid": tracks[track]}
            event |= {"ts": _us(begin - found.begin), "dur": _us(spent)}
            events.append(event | ({"args": next(facts)} if track == STEPS else {}))
    began = found.begin // 1_000_000
    other = {"began_unix_ms": began, "seconds": (found.end - found.begin) / 1e9, "slices_left_out": found.lost}
    other |= {"notes": found.notes}
    return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events})


def _of_requests(found: StepProfiled, records: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Yield the phases of the requests that lived while the profile ran, on a track for each request."""
    yield _named("process_name", "requests", 1)
    for number, record in enumerate(records):
        begin = round(record["arrived"] * 1e9)
        if begin > found.end or begin + record["e2e_s"] * 1e9 < found.begin:
            continue
        yield _named("thread_name", record["request_id"], 1, number)
        for phase in ("queue", "prefill", "decode"):
            spent = record[f"{phase}_s"]
            if spent is None:
                break
            last = min(begin + round(spent * 1e9), found.end)
            facts = {name: record[name] for name in ("num_prompt", "num_cached", "num_output", "state")}
            event = {"ph": "X", "name": phase, "pid": 1, "tid": number, "args": facts}
            yield event | {"ts": _us(begin - found.begin), "dur": _us(max(0, last - begin))}
            begin = last


def _named(what: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000

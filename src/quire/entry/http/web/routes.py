"""The routes of the live view. With `--no-web` all of them answer 404, with the code `web_off`.

/, /web/               the page (`page.py`); `/` is another route's for clients that do not accept HTML
/debug/live            server-sent events: facts of the engine, then frames
/debug/blocks          the map of KV blocks, with the requests that hold them
/debug/requests/{id}   the timeline of a request
/debug/profile         some steps, as a trace for Perfetto: `observed/profile.py`
/debug/trace           the calls of the steps of one request: the caller's next one, or that of ?request=ID
/debug/meetings        the table of what works with what
"""

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.config.serve import ServerConfig
from quire.contracts.live import BlockMap
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import error_answer, error_json
from quire.entry.http.observed.profile import FOREIGN, ProfileRoute
from quire.entry.http.request_response import ClientGone, Exchange, Receive, Scope
from quire.entry.http.sse import Send
from quire.entry.http.web.live_hub import event
from quire.entry.http.web.page import OFF
from quire.entry.http.web.timelines import timeline
from quire.procs.request_trace import BUSY, ENDED, NOBODY, PATIENCE, REPLACED, TRACE

OLDEST_MAP = 0.5  # seconds for which a map of blocks is given again
MAP_SHARE = 0.005  # most of the core's time that goes into maps
PER_TOKEN = "token"  # `Collective.per` of messages that grow with the tokens of a step

UNKNOWN = "no live request and none of the last 256 has this id: /debug/requests lists them."
ANSWER = re.compile("^(chatcmpl|cmpl)-")
REFUSED = '{"refused"'
NO_TRACE = {
    NOBODY: (504, f"no request of your key came within {PATIENCE:.0f} s: ask for a trace, then send a request."),
    BUSY: (409, "a trace of another request is being made: try again in a moment."),
    REPLACED: (409, "another caller has asked for the trace of the next request."),
    ENDED: (409, "the request has ended: name one that runs, or name none and send one, which is traced then."),
}  # reason why there is no trace -> status and message

Handler = Callable[[Request], Awaitable[Response]]


def live_routes(engine: ServedEngine, config: ServerConfig) -> list[Route]:
    """Return the routes of the live view."""
    paths: dict[str, Any] = {
        "/debug/live": LiveStream(engine, config),
        "/debug/blocks": BlockMapRoute(engine).answer,
        "/debug/requests/{request_id:path}": _timelines(engine),
        "/debug/trace": TraceRoute(engine),
        "/debug/profile": ProfileRoute(engine),
        "/debug/meetings": _meetings,
    }
    return [Route(path, _off if not config.http.web else paths[path], methods=["GET"]) for path in paths]


async def _off(request: Request) -> Response:
    return error_answer(404, OFF, "web_off")


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _timelines(engine: ServedEngine) -> Handler:
    async def answer(request: Request) -> Response:
        record = _record_of(request.path_params["request_id"], engine, caller_of(request.scope).tenant)
        if record is None:
            return error_answer(404, UNKNOWN, "unknown_request")
        return _json(timeline(record, engine.live.timelines))

    return answer


def _record_of(wanted: str, engine: ServedEngine, tenant: str) -> dict[str, Any] | None:
    """Return the record of a request by its id or by its answer's, which has a prefix; None: nobody knows it."""
    records = engine.requests(tenant)
    bare = ANSWER.sub("", wanted)
    return next((one for name in (wanted, bare) for one in records if one["request_id"] == name), None)


async def _meetings(request: Request) -> Response:
    from quire.plan.meetings import table  # the plan is not needed to serve

    return _json(table())


class BlockMapRoute:
    """The map of KV blocks. Callers at the same time share a map, and the next ones until it is too old."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._map: BlockMap | None = None
        self._until = 0.0

    async def answer(self, request: Request) -> Response:
        """Answer with the map, without the ids of other tenants' requests."""
        if self._map is None or time.monotonic() >= self._until:
            self._until = time.monotonic() + OLDEST_MAP
            found = msgspec.json.decode(str(await self._engine.control("blocks")), type=BlockMap)
            self._until = time.monotonic() + max(OLDEST_MAP, found.cost_s / MAP_SHARE)
            self._map = found
        tenant = caller_of(request.scope).tenant
        content = msgspec.to_builtins(self._map)
        for engine in content["engines"]:
            for owner in engine["owners"]:
                owner["id"] = owner["id"] if owner.pop("tenant") == tenant else None
        return _json(content)


class TraceRoute:
    """The trace of a request of the caller, as an ASGI application: it notices a caller that leaves."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        tenant = caller_of(scope).tenant
        try:
            await exchange.body()
            if exchange.header(b"sec-fetch-site") in FOREIGN:  # a browser asks for a page of somebody else
                words = "a page of another origin may not slow this server: open its own page."
                return await exchange.reply(error_json(403, words, "foreign_page"), status=403)
            wanted = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("request", [""])[0]
            known = _record_of(wanted, self._engine, tenant) if wanted else None
            if wanted and known is None:
                return await exchange.reply(error_json(404, UNKNOWN, "unknown_request"), status=404)
            record = known and {name: known[name] for name in ("request_id", "handles", "num_prompt")}
            try:
                async with exchange.watch() as watch:
                    found = str(await self._engine.control(TRACE, on=True, tenant=tenant, record=record))
                    watch.stop()
            except ClientGone:
                await self._engine.control(TRACE, on=False, tenant=tenant)  # the next request is not slowed for nobody
                raise
            if not found.startswith(REFUSED):
                return await exchange.reply(found.encode())
            why = msgspec.json.decode(found)["refused"]
            status, words = NO_TRACE[why]
            await exchange.reply(error_json(status, words, why), status=status)
        except ClientGone:
            return
        except Exception as error:  # the client always gets an answer
            await exchange.fail(error)


class LiveStream:
    """The stream of the live view, as an ASGI application."""

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self._engine, self._config = engine, config
        self._exchanges: list[dict[str, Any]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._stream(exchange)
        except ClientGone:
            return
        except Exception as error:  # the client always gets an answer
            await exchange.fail(error)

    async def _stream(self, exchange: Exchange) -> None:
        await exchange.body()
        facts = await self._facts()
        hub = self._engine.live
        reader = hub.open(caller_of(exchange.scope).tenant)
        stream = exchange.events(self._config.serve.keep_alive_interval)
        try:
            async with exchange.watch() as watch:
                await stream.write(event("engine", msgspec.json.encode(facts)))
                last = False
                while not last:
                    events, last = await reader.next()
                    await (stream.end(events) if last else stream.write(events))
                watch.stop()
        finally:
            stream.stop_comments()
            hub.close(reader)

    async def _facts(self) -> dict[str, Any]:
        """Return the data of the event `engine`."""
        engine, config = self._engine, self._config
        if self._exchanges is None:
            plan = msgspec.json.decode(str(await engine.control("plan")))
            self._exchanges = [
                {
                    "group": one["group"],
                    "kind": one["kind"],
                    "bytes_per_token": one["message_bytes"] * one["times"],
                }
                for one in (plan or {}).get("collectives", ())
                if one["per"] == PER_TOKEN and not one["when"]
            ]
            for one in self._exchanges:
                known = engine.live.exchanges
                known[one["group"]] = known.get(one["group"], 0) + one["bytes_per_token"]
        ready, place = engine.ready, engine.place
        assert ready is not None
        names = ("device", "dtype", "num_slots", "num_blocks", "block_size", "max_model_len", "depth", "num_drafts")
        return {
            "version": __version__,
            "models": config.model_names,
            **{name: getattr(ready, name) for name in (*names, "kv_bytes")},
            "process": place.number,
            "processes": place.count,
            "exchanges": self._exchanges,
        }

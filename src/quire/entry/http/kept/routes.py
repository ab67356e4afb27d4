"""/v1/responses/ID: retrieve, cancel and delete a stored response."""

import re
from urllib.parse import parse_qs

import msgspec

from quire.contracts.errors import shown
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError, not_implemented
from quire.entry.http.kept.store import Kept
from quire.entry.http.request_response import Exchange

INCLUDED = "a response has the data that its request included; set include there."


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Answer GET /v1/responses/ID with the response in its current state, or with `stream` with the events of its
    stream, those that are still to come too. DELETE ends and removes the response."""
    asked = parse_qs(exchange.scope["query_string"].decode("latin-1"))
    for field in asked.keys() & {"include", "include[]"}:
        raise not_implemented(field, INCLUDED)
    name, found = _find(context, exchange)
    if exchange.scope["method"] != "DELETE":
        number = _first(asked)
        if number is None:
            return await exchange.reply(found.body)
        if not found.streamed:
            words = f"{name} was not created with background=true and stream=true: retrieve it without stream."
            raise HttpError(400, words, param="stream")
        return await follow(context, exchange, name, number)
    await _end(context, name, found)
    context.responses.drop(name)
    await exchange.reply(msgspec.json.encode({"id": name, "object": "response", "deleted": True}))


async def follow(context: ServerContext, exchange: Exchange, name: str, number: int) -> None:
    """Answer with the events of a response's stream from `number` on. Without a reader the response goes on."""
    events = exchange.events(context.config.serve.keep_alive_interval)
    try:
        async with exchange.watch() as watch:
            async for found in context.responses.events(name, caller_of(exchange.scope).owner, number):
                await events.write(found)
            watch.stop()
            await events.end(b"")
    finally:
        events.stop_comments()


async def cancel(context: ServerContext, exchange: Exchange) -> None:
    """Cancel a background response. A finished one stays as it is."""
    name, found = _find(context, exchange)
    if not found.background:
        raise HttpError(400, f"{name} does not run in the background: to cancel it, close its connection.")
    await _end(context, name, found)
    await retrieve(context, exchange)


def _first(asked: dict[str, list[str]]) -> int | None:
    """Return the number of the first event that a query asks for; None: it asks for no stream."""
    stream, (after, *_) = asked.get("stream", ["false"])[-1], asked.get("starting_after", [""])
    if stream not in ("true", "false"):
        raise HttpError(400, f"stream must be true or false, not {shown(stream)}.", param="stream")
    if after and (stream == "false" or not re.fullmatch(r"[0-9]{1,9}", after)):
        words = "starting_after needs stream=true, and is the sequence_number of the last event that came."
        raise HttpError(400, words, param="starting_after")
    return None if stream == "false" else int(after) + 1 if after else 0


async def _end(context: ServerContext, name: str, found: Kept) -> None:
    if found.runner:
        await context.responses.end(name, found.owner)


def _find(context: ServerContext, exchange: Exchange) -> tuple[str, Kept]:
    name: str = exchange.scope["path_params"]["response_id"]
    return name, context.responses.find(name, caller_of(exchange.scope).owner)

"""/v1/responses/ID: retrieve, cancel and delete a stored response."""

from urllib.parse import parse_qs

import msgspec

from quire.entry.http.access.keyring import caller_of
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError, not_implemented
from quire.entry.http.kept.store import Kept
from quire.entry.http.request_response import Exchange

ASKED = dict.fromkeys(("stream", "starting_after"), "retrieve the response until its status is final.") | dict.fromkeys(
    ("include", "include[]"), "a response has the data that its request included; set include there."
)


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Answer GET /v1/responses/ID with the response in its current state. DELETE ends and removes the response."""
    asked = parse_qs(exchange.scope["query_string"].decode("latin-1"))
    for name in asked.keys() & ASKED.keys() - ({"stream"} if asked.get("stream") == ["false"] else set()):
        raise not_implemented(name, ASKED[name])
    name, found = _find(context, exchange)
    if exchange.scope["method"] != "DELETE":
        return await exchange.reply(found.body)
    await _end(context, name, found)
    context.responses.drop(name)
    await exchange.reply(msgspec.json.encode({"id": name, "object": "response", "deleted": True}))


async def cancel(context: ServerContext, exchange: Exchange) -> None:
    """Cancel a background response. A finished one stays as it is."""
    name, found = _find(context, exchange)
    if not found.background:
        raise HttpError(400, f"{name} does not run in the background: to cancel it, close its connection.")
    await _end(context, name, found)
    await retrieve(context, exchange)


async def _end(context: ServerContext, name: str, found: Kept) -> None:
    if found.runner:
        await context.responses.end(name, found.owner)


def _find(context: ServerContext, exchange: Exchange) -> tuple[str, Kept]:
    name: str = exchange.scope["path_params"]["response_id"]
    return name, context.responses.find(name, caller_of(exchange.scope).owner)

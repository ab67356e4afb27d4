"""/v1/responses: create a response, also in the background."""

import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.contracts.errors import shown
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError
from quire.entry.http.kept.background import in_background
from quire.entry.http.kept.store import Kept, ResponseStore
from quire.entry.http.openai.chat import WORDS as CHAT_WORDS
from quire.entry.http.openai.chat import answer_chat
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.prompts import away
from quire.entry.http.openai.responses_input import chat_request, check_fields, fitting
from quire.entry.http.openai.responses_schema import Item, ResponseRequest
from quire.entry.http.openai.responses_writer import ENCODE, ResponseWriter
from quire.entry.http.request_response import Exchange

DECODER = RequestDecoder(ResponseRequest, refused="refused_response_fields.txt")
WORDS = (
    (r"^messages$", "input"),
    (r"\bmessages\[\d+\]\.", "input: "),
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\btool_choice\.(allowed_tools|function)\b", "tool_choice"),
    (r"(?<=\])\.function\b", ""),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    *CHAT_WORDS,
)
REFERENCE = "item_reference"
ITEMS, OUTPUT = msgspec.json.Decoder(list[Item]), msgspec.json.Decoder(dict[str, msgspec.Raw])


async def respond(context: ServerContext, exchange: Exchange) -> None:
    """Answer POST /v1/responses: generate the response, then answer. With `background` answer first, with `stream` too
    with the events of a stream that goes on without this client."""
    request = await DECODER.read(context, exchange)
    exchange.words = WORDS
    check_fields(request)
    owner, name = caller_of(exchange.scope).owner, f"resp_{secrets.token_hex(16)}"
    store = context.responses
    given = request.input or []
    items = [Item(role="user", content=given)] if isinstance(given, str) else given
    chain, sources = list(store.chain(request.previous_response_id, owner)), _referred(store, owner, items)
    exchange.size += sum(len(kept.body) + len(kept.items) for kept in (*chain, *sources))
    chat = await away(context, exchange, lambda: chat_request(request, _earlier(chain), _resolve(items, sources)))
    if request.truncation == "auto":
        chat = await fitting(context, exchange, chat)

    background, previous = bool(request.background), request.previous_response_id
    streamed = background and bool(request.stream)
    unmade = Kept(
        owner=owner, body=b"", items=ENCODE(items), previous=previous, background=background, streamed=streamed
    )
    made: ResponseWriter | None = None

    def keep(body: bytes) -> None:
        if request.store is not False:
            store.keep(name, replace(unmade, body=body), made.take() if made else ())

    def writer(job: Any, chat: Any, tokenizer: Any) -> ResponseWriter:
        nonlocal made
        made = ResponseWriter(job, tokenizer, request, name, keep, collects=streamed)
        exchange.ending = made.fail
        return made

    answering = partial(answer_chat, context, request=chat, writer=writer)
    if not request.background:
        return await answering(exchange)
    await in_background(context, exchange, name, unmade, answering, lambda: made)


def _referred(store: ResponseStore, owner: bytes, items: list[Item]) -> list[Kept]:
    """Return the stored responses that items refer to. An item's id contains the id of its response."""
    found = list[Kept]()
    for name in {f"resp_{(item.id or '').partition('_')[2][:32]}" for item in items if item.type == REFERENCE}:
        with suppress(HttpError):
            found.append(store.find(name, owner))
    return found


def _resolve(items: list[Item], sources: Iterable[Kept]) -> list[Item]:
    """Replace item references by their items, in place. Raises 404 for an unknown one."""
    known = {item.id: item for kept in sources for item in _output(kept)}
    for at, item in enumerate(items):
        if item.type == REFERENCE and item.id not in known:
            raise HttpError(
                404,
                f"input[{at}]: no stored response has an item {shown(item.id or '')}: send the item itself.",
                code="item_not_found",
                param="input",
            )
        items[at] = known[item.id] if item.type == REFERENCE else item
    return items


def _output(kept: Kept) -> list[Item]:
    return ITEMS.decode(OUTPUT.decode(kept.body)["output"])


def _earlier(chain: Iterable[Kept]) -> list[Item]:
    """Return the items of earlier responses in order. `chain`: these responses, the newest first."""
    return [item for kept in reversed([*chain]) for item in (*ITEMS.decode(kept.items), *_output(kept))]

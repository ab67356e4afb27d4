"""A response that is made in the background: a task of its own, whose exchange has no client."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from quire.entry.http.context import ServerContext
from quire.entry.http.errors import http_error
from quire.entry.http.kept.routes import follow
from quire.entry.http.kept.store import Kept, Running
from quire.entry.http.observed.spans import in_own_span
from quire.entry.http.request_response import ClientGone, Exchange


class Making(Protocol):
    """A response that is being made. When it ends, it is stored with the events that nobody has taken."""

    @property
    def body(self) -> bytes:
        """The response in its current state, as JSON."""

    def take(self) -> list[bytes]:
        """Return the events since the last call, if they are collected."""

    def stop(self, status: str) -> bytes:
        """End the response with a status."""

    def fail(self, status: int, body: bytes) -> bytes:
        """End the response with an error: its HTTP status and its JSON."""


async def in_background(
    context: ServerContext,
    exchange: Exchange,
    name: str,
    unmade: Kept,
    answering: Callable[[Exchange], Awaitable[None]],
    making: Callable[[], Making | None],
) -> None:
    """Begin the response `name`, and answer with its state, or with its events if these are stored. An invalid request
    raises, as one in the foreground does.

    unmade      what is stored of the response, without its body
    answering   answers an exchange with the response
    making      returns the response, once it is being made
    """
    gone, asked, store = asyncio.Event(), asyncio.get_running_loop().create_future(), context.responses

    async def receive() -> dict[str, str]:
        """ASGI `receive` without a client: report a disconnect once `gone` is set. Sets `asked` when it is called."""
        if making() and not asked.done():
            asked.set_result(None)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """ASGI `send` without a client: drop the message, because the response and its events are stored."""
        if (made := making()) and (events := made.take()):
            store.say(name, events)

    state = exchange.scope.get("state", {}) | {"request_id": name}
    alone = Exchange({**exchange.scope, "state": state, "extensions": {}}, receive, send)
    alone.size, alone.warnings, alone.words = exchange.size, exchange.warnings, exchange.words
    task = asyncio.create_task(in_own_span(alone.scope, answering(alone)))
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()  # raises at once if the request is invalid or the engine's queue is full
    made = making()
    assert made is not None
    if not task.done():
        running = Running(task, gone, asyncio.Event())
        store.begin(name, replace(unmade, body=made.body, runner=store.runner), running)
        task.add_done_callback(partial(_settle, context, name, made))
    if unmade.streamed:
        return await follow(context, exchange, name, 0)
    await exchange.reply(made.body)


def _settle(context: ServerContext, name: str, made: Making, task: "asyncio.Future[None]") -> None:
    """Store a response that was cancelled or failed. A completed one is stored already."""
    running = context.responses.running.pop(name)
    error = None if task.cancelled() else task.exception()
    if isinstance(error, ClientGone):
        made.stop("cancelled")
    elif error is not None:
        answer = http_error(error)
        made.fail(answer.status, answer.body())
    running.news.set()

"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}.

All layers answer with OpenAI's format. A middleware converts the errors of Anthropic's routes, so that no other layer
has to know the API of a request.
"""

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.contracts.error_bodies import MESSAGES_PATHS, messages_body
from quire.entry.http.openai.schema import ErrorResponse


def anthropic_error(status: int, body: bytes, request_id: str | None) -> tuple[int, bytes]:
    """Convert an error body of OpenAI's format. Return the status and the body in Anthropic's format."""
    error = msgspec.json.decode(body, type=ErrorResponse).error
    if status == 429 and error.code == "engine_overloaded":
        status = 529  # Anthropic's own; 429 is for the limits of one account
    return status, messages_body(status, error.message, request_id)


def own_errors(app: ASGIApp) -> ASGIApp:
    """Middleware for Anthropic's routes: it converts their errors, and adds the header `request-id` to all answers."""

    async def layer(scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []  # the start of an error, held until its body comes, which is always one piece

        async def passing(message: Message) -> None:
            request_id = scope["state"]["request_id"]
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"request-id", request_id.encode())]
                if message["status"] >= 400:
                    return held.append(message)
            elif held:
                start = held.pop()
                start["status"], message["body"] = anthropic_error(start["status"], message["body"], request_id)
                start["headers"] = [header for header in start["headers"] if header[0] != b"content-length"]
                start["headers"].append((b"content-length", b"%d" % len(message["body"])))
                await send(start)
            await send(message)

        await app(scope, receive, passing if scope["type"] == "http" and MESSAGES_PATHS.search(scope["path"]) else send)

    return layer

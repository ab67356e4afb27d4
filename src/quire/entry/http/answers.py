"""Answers that the server gives by itself, before and beside its routes, as Starlette responses.

Knows statuses; the form of an error body and what each exception means are in `errors.py`.
"""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from quire.entry.http.errors import AUTHENTICATION, INVALID_REQUEST, RATE_LIMIT, SERVER_ERROR, HttpError

JSON = "application/json"


def error_json(status: int, message: str, code: str | None = None) -> bytes:
    """The body of an error answer; its type follows from the status."""
    kind = {401: AUTHENTICATION, 429: RATE_LIMIT}.get(status, SERVER_ERROR if status >= 500 else INVALID_REQUEST)
    return HttpError(status, message, kind=kind, code=code).body()


def error_answer(
    status: int, message: str, code: str | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as a response."""
    return Response(error_json(status, message, code), status, headers, JSON)


def json_answer(content: object, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """Any JSON as a response."""
    return Response(msgspec.json.encode(content), status, headers, JSON)

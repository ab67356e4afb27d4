"""Errors as HTTP answers: which status, type and code each class of `contracts/errors.py` gets, and the JSON body.

The body is OpenAI's, with all four keys: {"error": {"message", "type", "param", "code"}}. Statuses that clients retry
(408, 409, 429, 5xx) carry what a client needs to retry well: `Retry-After`, or `x-should-retry: false` when the same
request would fail again. Knows nothing of routes.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from quire.contracts import errors

LOG = logging.getLogger("quire")

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
RETRY_SOON = 1  # seconds: a full queue drains within a few steps
RETRY_LATER = 5  # seconds: a restart, another replica, a queue that has stood still for long
# An escape of the first half of a surrogate pair without the second after it, or of a second without a first.
HALF = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..(?<!\\u[dD][89abAB]..\\u....))")
DETERMINISTIC = (("x-should-retry", "false"),)


class HttpError(errors.QuireError):
    """An answer other than 2xx. Raised by the HTTP side itself, or made from another error by `http_error`.

    kind   "type" of the body;  headers   further response headers, (name, value) in ASCII
    """

    def __init__(self, status: int, message: str, *, kind: str = INVALID_REQUEST, code: str | None = None,
                 param: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})


def _answer(status: int, kind: str, code: str | None = None, retry: int | None = None) -> dict[str, Any]:
    return {"status": status, "kind": kind, "code": code,
            "headers": () if retry is None else (("retry-after", str(retry)),)}


INTERNAL = _answer(500, SERVER_ERROR, "internal_error") | {"headers": DETERMINISTIC}
# How the classes of errors are answered; the first that an error is an instance of decides.
ANSWERS: tuple[tuple[type[errors.QuireError], dict[str, Any]], ...] = (
    (errors.PromptTooLong, _answer(400, INVALID_REQUEST, "context_length_exceeded")),
    (errors.InvalidParameter, _answer(400, INVALID_REQUEST, "invalid_value")),
    (errors.QueueFull, _answer(429, RATE_LIMIT, "engine_overloaded", RETRY_SOON)),
    (errors.QueueTimeout, _answer(408, SERVER_ERROR, "queue_timeout", RETRY_LATER)),
    (errors.RequestFailed, INTERNAL),
    (errors.UserError, _answer(400, INVALID_REQUEST)),
    (errors.EngineDead, _answer(503, SERVER_ERROR, "engine_dead", RETRY_LATER)),
    (errors.EngineClosed, _answer(503, SERVER_ERROR, "engine_closed", RETRY_LATER)),
    (errors.EngineStarting, _answer(503, SERVER_ERROR, "engine_starting", RETRY_LATER)),
    (errors.EngineError, _answer(503, SERVER_ERROR, "engine_unavailable", RETRY_LATER)),
)


def http_error(error: BaseException) -> HttpError:
    """The answer for any error; one that nobody expected is logged and told to the client without its details."""
    if isinstance(error, HttpError):
        return error
    answer = next((answer for kind, answer in ANSWERS if isinstance(error, kind)), INTERNAL)
    if isinstance(error, errors.RequestFailed):
        status = {"deadline": 504, "invalid_grammar": 400, "grammar_failed": 400}.get(error.code, 500)
        kind = INVALID_REQUEST if status == 400 else SERVER_ERROR
        answer = answer | {"code": error.code} if status == 500 else _answer(status, kind, error.code)
    elif answer is INTERNAL:
        LOG.error("internal error", exc_info=error)
        return HttpError(message="internal error: the server's log says more; report it with the request id.", **answer)
    return HttpError(message=str(error), param=error.param if isinstance(error, errors.InvalidParameter) else None,
                     **answer)


def not_implemented(what: str, reason: str, param: str | None = None) -> HttpError:
    """400 for something that would change the answer and that nothing here acts on, in the field `param` (`what`)."""
    message = f"{what} is not implemented yet: {reason}"
    return HttpError(400, message, code="unsupported_parameter", param=param or what)


def too_long(num_prompt: int, max_model_len: int, asked: int | None, param: str, limit: str) -> HttpError:
    """400 for a prompt that does not fit the context, alone or with the `asked` tokens after it, which the field
    `limit` asks for and is to blame where the prompt alone would fit.

    By the first words litellm knows it, by "prompt is too long" langchain and clients of Anthropic's API."""
    wanted = f", and {errors.shown(asked)} more asked for" if asked else ""
    room = max_model_len - num_prompt
    fits = asked and room > 0
    fix = "shorten the prompt" + (f" or lower {limit} to {room}" if fits else "")
    return HttpError(400, f"this model's maximum context length is {max_model_len} tokens, and the prompt is too long "
                     f"with its {num_prompt}{wanted}: {fix}.", code="context_length_exceeded",
                     param=limit if fits else param)


def error_json(status: int, message: str, code: str | None = None) -> bytes:
    """The body of an error answer; its type follows from the status."""
    kind = {401: AUTHENTICATION, 429: RATE_LIMIT}.get(status, SERVER_ERROR if status >= 500 else INVALID_REQUEST)
    return HttpError(status, message, kind=kind, code=code).body()


def error_answer(
    status: int, message: str, code: str | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as a response, for what is refused before and beside the routes."""
    return Response(error_json(status, message, code), status, headers, "application/json")


def json_fault(error: Exception, text: bytes) -> str:
    """The words for a text that is no JSON. The parser's own words for half of a character mislead."""
    if HALF.search(text.replace(rb"\\", b"")):
        return "a \\u escape is half of a surrogate pair; send whole characters"
    return str(error)

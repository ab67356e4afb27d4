"""Errors as HTTP responses: status, type and code of each class of `contracts/errors.py`, and the JSON body.

The body is OpenAI's, with all four keys: {"error": {"message", "type", "param", "code"}}. Clients retry the statuses
408, 409, 429 and 5xx. These have a header `Retry-After`, or `x-should-retry: false` when the same request would fail
again. Knows nothing of routes.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from quire.contracts import errors
from quire.contracts.error_bodies import openai_body

LOG = logging.getLogger("quire")

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
TOO_LONG = "context_length_exceeded"  # code of a prompt that does not fit
RETRY_SOON = 1  # seconds: a full queue drains within a few steps
RETRY_LATER = 5  # seconds: for a restart, another replica, or a queue that does not move
# The \u escape of a lone surrogate: a high one without a low one after it, or a low one without a high one before it.
HALF = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..(?<!\\u[dD][89abAB]..\\u....))")
DETERMINISTIC = (("x-should-retry", "false"),)


class HttpError(errors.QuireError):
    """An error response. Routes raise it, or `http_error` makes it from another error.

    kind      "type" in the JSON body, such as "invalid_request_error"
    headers   further response headers: (name, value) in ASCII
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """Return the JSON body."""
        return openai_body(self.message, self.kind, self.code, self.param)


def _answer(status: int, kind: str, code: str | None = None, retry: int | None = None) -> dict[str, Any]:
    return {
        "status": status,
        "kind": kind,
        "code": code,
        "headers": () if retry is None else (("retry-after", str(retry)),),
    }


FAILED = {  # code of a `RequestFailed` -> status; of other codes 500
    "deadline": 504,
    "first_token_timeout": 504,
    "replica": 503,
    "invalid_grammar": 400,
    "grammar_failed": 400,
}
INTERNAL = _answer(500, SERVER_ERROR, "internal_error") | {"headers": DETERMINISTIC}
# Error class -> its response. The first class that an error is an instance of counts.
ANSWERS: tuple[tuple[type[errors.QuireError], dict[str, Any]], ...] = (
    (errors.PromptTooLong, _answer(400, INVALID_REQUEST, TOO_LONG)),
    (errors.InvalidParameter, _answer(400, INVALID_REQUEST, "invalid_value")),
    (errors.QueueFull, _answer(429, RATE_LIMIT, "engine_overloaded", RETRY_SOON)),
    (errors.QueueTimeout, _answer(408, SERVER_ERROR, "queue_timeout", RETRY_LATER)),
    (errors.RequestFailed, INTERNAL),
    (errors.UserError, _answer(400, INVALID_REQUEST)),
    (errors.EngineDead, _answer(503, SERVER_ERROR, "engine_dead", RETRY_LATER)),
    (errors.EngineClosed, _answer(503, SERVER_ERROR, "engine_closed", RETRY_LATER)),
    (errors.EngineAsleep, _answer(503, SERVER_ERROR, "engine_asleep", RETRY_LATER)),
    (errors.EngineStarting, _answer(503, SERVER_ERROR, "engine_starting", RETRY_LATER)),
    (errors.EngineError, _answer(503, SERVER_ERROR, "engine_unavailable", RETRY_LATER)),
)


def http_error(error: BaseException) -> HttpError:
    """Return the HTTP response of an error. An unexpected error is logged, and its details are kept from the client."""
    if isinstance(error, HttpError):
        return error
    answer = next((answer for kind, answer in ANSWERS if isinstance(error, kind)), INTERNAL)
    if isinstance(error, errors.RequestFailed):
        status = FAILED.get(error.code, 500)
        kind = INVALID_REQUEST if status == 400 else SERVER_ERROR
        answer = answer | {"code": error.code} if status == 500 else _answer(status, kind, error.code)
    elif answer is INTERNAL:
        LOG.error("internal error", exc_info=error)
        return HttpError(
            message="internal error: the server's log has its cause; report it with the request id.", **answer
        )
    return HttpError(
        message=str(error), param=error.param if isinstance(error, errors.InvalidParameter) else None, **answer
    )


def not_implemented(what: str, reason: str, param: str | None = None) -> HttpError:
    """Return a 400 error for a feature that would change the answer and is not implemented.

    what     name of the feature, for the message
    param    request field that asks for the feature (default: `what`)
    """
    message = f"{what} is not implemented yet: {reason}"
    return HttpError(400, message, code="unsupported_parameter", param=param or what)


def too_long(num_prompt: int, max_model_len: int, asked: int | None, param: str, limit: str) -> HttpError:
    """Return a 400 error for a prompt that does not fit the context, alone or with the `asked` output tokens.

    param   field of the prompt. The error names this field when the prompt alone does not fit
    limit   field of `asked`, such as max_tokens. The error names this field when only both together do not fit
    Clients parse the message: litellm knows "this model's maximum context length is", langchain and clients of
    Anthropic's API know "prompt is too long".
    """
    wanted = f", and the request asks for {errors.shown(asked)} more" if asked else ""
    room = max_model_len - num_prompt
    fits = asked and room > 0
    fix = "shorten the prompt" + (f" or lower {limit} to {room}" if fits else "")
    return HttpError(
        400,
        f"this model's maximum context length is {max_model_len} tokens, and the prompt is too long "
        f"with its {num_prompt}{wanted}: {fix}.",
        code=TOO_LONG,
        param=limit if fits else param,
    )


def error_json(status: int, message: str, code: str | None = None) -> bytes:
    """Return the body of an error response. Its type follows from the status."""
    kind = {401: AUTHENTICATION, 429: RATE_LIMIT}.get(status, SERVER_ERROR if status >= 500 else INVALID_REQUEST)
    return HttpError(status, message, kind=kind, code=code).body()


def error_answer(
    status: int, message: str, code: str | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as a Starlette response, for requests that are refused outside the routes."""
    return Response(error_json(status, message, code), status, headers, "application/json")


def json_fault(error: Exception, text: bytes) -> str:
    """Return the message for invalid JSON: the parser's own, or a clearer text for half of a surrogate pair."""
    if HALF.search(text.replace(rb"\\", b"")):
        return "a \\u escape is half of a surrogate pair; send whole characters"
    return str(error)

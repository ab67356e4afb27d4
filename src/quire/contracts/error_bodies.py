"""Bodies of HTTP errors, as the server and the router send them: in OpenAI's format, and in Anthropic's.

{"error": {"message", "type", "param", "code"}}                            all routes but those of Anthropic
{"type": "error", "error": {"type", "message"}, "request_id"}              /v1/messages
"""

import re

import msgspec

MESSAGES_PATHS = re.compile(r"/v1/messages(/|\?|$)")  # for `search`, since a proxy's root path may stand before it
MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def openai_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    """Return the body of an error in OpenAI's format, with all four keys. `kind`: such as "invalid_request_error"."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def messages_body(status: int, message: str, request_id: str | None) -> bytes:
    """Return the body of an error in Anthropic's format."""
    kind = MESSAGES_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})

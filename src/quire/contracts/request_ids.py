"""Ids of requests: a caller's X-Request-Id, if it is safe in headers and logs, else a new id."""

import re
import secrets
from collections.abc import Iterable

SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id of a request with these headers."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if SANE_ID.fullmatch(given) else secrets.token_hex(16)

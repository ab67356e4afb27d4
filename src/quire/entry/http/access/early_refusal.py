"""A request that the protocol refuses before any route: its error, and the bytes of its answer."""

import http
from collections.abc import Iterable

from quire.contracts.error_bodies import MESSAGES_PATHS
from quire.entry.http.anthropic.errors import anthropic_error
from quire.entry.http.errors import error_json


class EarlyRefusal(Exception):
    """Raised inside a callback of the HTTP parser to send an error and close the connection."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def answer(self, path: str, request_id: str, common: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the answer. path: "" where it is unknown; common: headers of all answers"""
        body = error_json(self.status, str(self), self.code)
        if MESSAGES_PATHS.search(path):
            body = anthropic_error(self.status, body, None)[1]
        headers = [
            *common,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id.encode()),
            *([(b"retry-after", b"1")] if self.status in (429, 503) else []),
            (b"connection", b"close"),
        ]
        status = http.HTTPStatus(self.status)
        first = b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())
        return b"\r\n".join([first, *map(b": ".join, headers), b"", body])

"""Lines of the log about single requests: the access log, and a line per generation. No line holds a text of a user.

Both say how a request ended, since a stream that fails after its first event has the status 200:

finish   finish reasons of the completions, such as "length" or "error+stop"; "aborted": it did not finish
cause    code of the error, or cause of the abort ("disconnect", "engine"), as in `request_aborts`
error    code of the error that the client got; in the access log only
"""

import logging
import sys
from collections.abc import Sequence

from starlette.types import Scope

from quire.config.serve import LogConfig
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.request_stream import RequestStream
from quire.observe.log_lines import JSON, json_line

LOG = logging.getLogger("quire")


class AccessLog:
    """The lines about HTTP requests: with --access-log, and at the level debug. process: name of this process"""

    def __init__(self, config: LogConfig, process: str = "http") -> None:
        self._on, self._json, self._process = config.access_log, config.log_format == JSON, process
        self._quiet = config.quiet_paths

    def tell(self, scope: Scope, status: int, seconds: float, **facts: object) -> None:
        """Print the line of an answered request. facts: further fields"""
        if scope["path"] in self._quiet or not (self._on or LOG.isEnabledFor(logging.DEBUG)):
            return
        client, method, path = _client(scope), scope["method"], ascii(scope["path"])[1:-1]
        request_id = scope["state"]["request_id"]
        words = "".join(f" {name}={value}" for name, value in facts.items())
        line = f"{client} {method} {path} {status} {seconds:.3f}s {request_id}{words}"
        if self._json:
            asked = {"client": client, "method": method, "path": path, "status": status, "request_id": request_id}
            line = json_line(
                "request", "info", self._process, **asked, **_key(scope), **facts, seconds=round(seconds, 6)
            )
        print(line, file=sys.stderr)


def log_generation(scope: Scope, request_id: str, streams: Sequence[RequestStream], seconds: float) -> None:
    """Log a generation that has ended in one line."""
    completions = [each for stream in streams for one in stream.generations for each in one.completions]
    counts = {"prompt_tokens": num_prompt(streams), "generated_tokens": sum(len(c.token_ids) for c in completions)}
    ended = ending(streams)
    LOG.info(
        "request %s: %d prompt tokens, %d generated, %s%s, %.3f s",
        request_id,
        *counts.values(),
        ended["finish"],
        f" ({ended['cause']})" if "cause" in ended else "",
        seconds,
        extra=_fields(scope, request_id, seconds, **counts, **ended),
    )


def log_embedding(scope: Scope, request_id: str, streams: Sequence[RequestStream], seconds: float) -> None:
    """Log texts whose vectors were computed in one line."""
    counts = {"prompt_tokens": num_prompt(streams), "texts": sum(len(stream.generations) for stream in streams)}
    LOG.info(
        "request %s: %d prompt tokens in %d texts, embedded, %.3f s",
        request_id,
        *counts.values(),
        seconds,
        extra=_fields(scope, request_id, seconds, **counts),
    )


def num_prompt(streams: Sequence[RequestStream]) -> int:
    """Return the tokens of all prompts."""
    return sum(len(one.prompt_token_ids) for stream in streams for one in stream.generations)


def facts_of(scope: Scope) -> dict[str, str]:
    """Return how an answered HTTP request ended: `finish`, `cause` and `error`, those that it has."""
    state = scope["state"]
    ended = ending(state["ticket"].streams) if "ticket" in state else {}
    return ended | ({"error": state["error"]} if "error" in state else {})


def ending(streams: Sequence[RequestStream]) -> dict[str, str]:
    """Return `finish` of a request that has ended, and `cause` if there is one; {}: the engine never got it."""
    ends = {each.ending(stream.cause) for stream in streams for one in stream.generations for each in one.completions}
    parts = zip(("finish", "cause"), zip(*sorted(ends), strict=True), strict=False)
    return {name: "+".join(sorted({*values} - {""})) for name, values in parts if any(values)}


def _fields(scope: Scope, request_id: str, seconds: float, **more: object) -> dict[str, object]:
    return {"fields": {"request_id": request_id, **_key(scope), **more, "seconds": round(seconds, 6)}}


def _key(scope: Scope) -> dict[str, str]:
    return {"key": name} if (name := caller_of(scope).name) else {}


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "-"

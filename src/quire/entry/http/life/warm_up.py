"""Requests that a server answers before it is ready (--warmup-requests), in the format that `quire run-batch` reads.

They take the way of a client's request behind the checks of keys and limits, so they load what a first request would
load, and leave their prefixes in the cache. A request that fails ends the start. Knows nothing of ports.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.config.serve import HttpConfig
from quire.contracts.errors import ConfigError
from quire.entry.http.batch import Line, all_at_once, ask, read_lines
from quire.entry.http.context import ServerContext
from quire.entry.http.openai.chat import chat
from quire.entry.http.openai.completions import complete
from quire.entry.http.openai.embeddings import embed
from quire.entry.http.openai.routes import Endpoint
from quire.procs.messages import Loading

HANDLERS = {"/v1/completions": complete, "/v1/chat/completions": chat, "/v1/embeddings": embed}
APART = "Keys have prefix caches of their own and find none of these (--share-prefix-cache-across-keys)."


def read_warm_up(http: HttpConfig) -> list[tuple[int, Line]]:
    """Return the requests of the file that the option names, with the numbers of their lines. [] without the option.

    Raises `ConfigError` for a file that cannot be used, with the number of the line.
    """
    if http.warmup_requests is None:
        return []
    file = Path(http.warmup_requests)
    try:
        lines = list(read_lines(file, http.max_body_bytes))
    except OSError as error:
        raise ConfigError(f"warmup_requests: {file} cannot be read: {error.strerror}.") from None
    if not lines:
        raise ConfigError(f"warmup_requests: {file} has no requests: leave the option out.")
    for number, line in lines:
        if not line.problem and line.url not in HANDLERS:
            line.problem = f"line {number}: url must be one of {', '.join(HANDLERS)}."
        if line.problem:
            raise refusal(file, line.problem)
    return lines


def refusal(file: object, words: str) -> ConfigError:
    """Return the error of a request in the file. words: begin with its line"""
    return ConfigError(f"warmup_requests: {file}, {words}")


class WarmUp:
    """The requests of a file. Raises `ConfigError` as `read_warm_up`. say: shows a sentence to the operator"""

    def __init__(self, context: ServerContext, say: Callable[[str], None]) -> None:
        http, access = context.config.http, context.config.access
        self._context, self._say, self._file = context, say, http.warmup_requests
        several = access.api_key_file is not None or len(access.api_key) > 1
        self._note = f" {APART}" if several and not access.share_prefix_cache_across_keys else ""
        self._lines = read_warm_up(http)

    async def run(self, tell: Callable[[Loading], None]) -> None:
        """Answer all requests, and say what that has filled. tell: gets the progress. Raises `ConfigError` with the
        number of a line whose request fails."""
        began, total, done = time.monotonic(), len(self._lines), 0
        counts = {"prompt_tokens": 0, "completion_tokens": 0}

        async def answer(number: int, line: Line) -> None:
            nonlocal done
            status, _, body = await ask(Endpoint(self._context, HANDLERS[line.url]), line)
            found: dict[str, Any] = msgspec.json.decode(body)
            if status != 200:
                raise refusal(self._file, f"line {number}: {found['error']['message']}")
            for name in counts:
                counts[name] += found["usage"].get(name, 0)
            done += 1
            tell(Loading("warm-up", done, total, "requests"))

        tell(Loading("warm-up", 0, total, "requests"))
        await all_at_once(iter(self._lines), answer)
        seconds = time.monotonic() - began
        plan = msgspec.json.decode(str(await self._context.engine.control("plan")))
        runner = plan["runner"] if plan else {}  # of several ranks a list
        recorded = (runner[0] if isinstance(runner, list) else runner).get("recordings")
        cached = self._context.metrics.snapshot().num_cached_blocks
        self._say(
            f"warm-up: {total} requests in {seconds:.1f} s, {counts['prompt_tokens']:,} prompt tokens, "
            f"{counts['completion_tokens']:,} generated; {cached:,} KV blocks cached"
            + (f", {recorded} kinds of steps recorded" if recorded else "")
            + f".{self._note}"
        )

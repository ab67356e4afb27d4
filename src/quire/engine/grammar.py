"""Grammars of live requests: compiled in threads beside the loop, then advanced by every confirmed token.

A request holds one matcher from its first mask to its end, preempted or not. Compiled grammars are kept for others.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.contracts.errors import InvalidParameter, QueueFull, RequestFailed
from quire.contracts.request import NewRequest, Request
from quire.contracts.step import I32
from quire.text.grammar import MOST_COPIES, Grammar, GrammarCompiler, error_of, only, without
from quire.text.json_names import Names

if TYPE_CHECKING:
    from llguidance import LLMatcher

LOG = logging.getLogger("quire")
THREADS = 2  # that compile grammars
COMPILE_SECONDS = 10.0  # of compiling; the time in the queue before does not count
MOST_WAITING = 64  # requests whose grammars are being compiled, or wait for it
KEPT = 64  # copies of compiled grammars, of at most 50 MB each (`quire.text.grammar.LIMITS`)
MOST_PLACES = 64  # further masks computed for one mask, to see if a JSON name goes on; each takes about 0.1 ms
IDLE_SECONDS = 0.01  # between two checks of grammars that are being compiled, when there is nothing else to do


@dataclass
class _Held:
    """State of a request's grammar.

    after    bytes that end the reasoning; empty after its end;  before  last bytes of the output
    budget   tokens of reasoning that are left;  closing  tokens that are forced when the budget is used up
    names    names in the objects of a JSON output; None: the output is not JSON
    inside, patterns   as in `quire.text.grammar.Grammar`
    """

    spec: str
    future: Future[Grammar]
    deadline: float | None = None
    matcher: "LLMatcher | None" = None
    after: bytes = b""
    before: bytes = b""
    budget: float = math.inf
    closing: tuple[int, ...] = ()
    inside: bool = False
    names: Names | None = None
    patterns: bool = False


class Grammars:
    """Grammars of a core's requests; not thread-safe. Without a `compiler` (no tokenizer) `start` refuses requests."""

    def __init__(self, compiler: GrammarCompiler | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._compiler, self._clock = compiler, clock
        self._pool: ThreadPoolExecutor | None = None
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()  # least recently used first
        self._held: dict[int, _Held] = {}  # by handle
        self._compiling: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def start(self, new: NewRequest, *, bounded: bool) -> None:
        """Begin to compile the grammar of a request, in a thread.

        Raises `InvalidParameter` when the engine has no compiler. With `bounded`, raises `QueueFull` when too many
        grammars wait already.
        """
        if self._compiler is None:
            raise InvalidParameter("structured_outputs needs a tokenizer, and this engine has none: start the engine "
                                   "without skip_tokenizer_init.",
                                   param="structured_outputs")
        assert new.grammar is not None
        if bounded and len(self._compiling) >= MOST_WAITING and new.grammar not in self._cache:
            raise QueueFull(f"{MOST_WAITING} requests wait for grammars to be compiled: try again later.")
        self._pool = self._pool or ThreadPoolExecutor(THREADS, thread_name_prefix="quire-grammar")
        future = self._cache.get(new.grammar)
        if future is None:
            specs = {held.spec for held in self._held.values()} | {new.grammar}
            most = min(MOST_COPIES, max(1, KEPT // (2 * len(specs))))  # many grammars in use: each has few outputs
            future = self._cache[new.grammar] = self._pool.submit(self._compiler.compile, new.grammar, most)
            self._trim()
        self._cache.move_to_end(new.grammar)
        held = _Held(new.grammar, future)
        self._held[new.handle] = self._compiling[new.handle] = held

    def settled(self) -> Iterator[tuple[int, RequestFailed | None]]:
        """Yield (handle, None or the failure) for each grammar whose compilation ended since the last call."""
        waiting = list(self._compiling.items())
        for handle, held in waiting:
            if held.deadline is None and held.future.running():
                held.deadline = self._clock() + COMPILE_SECONDS
            if not held.future.done() and (held.deadline is None or self._clock() < held.deadline):
                continue
            del self._compiling[handle]
            yield handle, self._take_up(held)
        if len(self._compiling) < len(waiting):
            self._trim()

    def wait(self) -> None:
        """Wait until a grammar is compiled, IDLE_SECONDS at most. Returns at once when none is being compiled."""
        wait([held.future for held in self._compiling.values()], IDLE_SECONDS, FIRST_COMPLETED)

    def advance(self, handle: int, token: int) -> bool:
        """Advance the request's grammar by a confirmed token. Returns True when no further token can follow.

        Raises `RequestFailed` when the grammar does not allow the token.
        """
        held, compiler = self._held[handle], self._compiler
        assert compiler is not None
        if held.after:  # bytes of this token beyond the end of the reasoning are free, too
            held.closing = held.closing[held.budget <= 0 :]
            held.before, held.budget = held.before + compiler.token_bytes(token), held.budget - 1
            if held.after in held.before or not held.closing:
                held.after = b""
            held.before = held.before[-len(held.after) :]
            if not held.inside:
                return False
        if held.matcher is None:
            return False
        if not held.matcher.consume_token(token):
            raise self._failure(held)
        if held.names is not None:
            held.names.add(compiler.token_bytes(token))
        return held.matcher.is_stopped()

    def masks(self, requests: Sequence[Request | None]) -> tuple[I32, list[tuple[Request, RequestFailed | None]]]:
        """Return bit masks [rows, words] of allowed tokens, and (request, failure or None) for requests that must end.

        A request ends when no token can follow its output, or when its grammar fails. `requests` has an entry for each
        row: None if the row's request has ended.
        """
        assert self._compiler is not None
        matchers: list[LLMatcher | None] = []
        enders: list[Sequence[int]] = []
        for request in requests:
            held = None if request is None else self._held[request.new.handle]
            matchers.append(None if held is None or held.after and not held.inside else held.matcher)
            may_stop = request is not None and len(request.tokens) - request.num_prompt >= request.new.min_tokens
            enders.append(request.new.stop_ids if request is not None and may_stop else ())
        words, over = self._compiler.masks(matchers, enders)
        for row, request in enumerate(requests):
            held = None if request is None else self._held[request.new.handle]
            if held is not None and held.names is not None and not held.after and row not in over:
                _once(words[row], held)
            if request is None or held is None or not held.after:
                continue
            if held.budget <= 0:
                only(words[row], held.closing[0])
            elif not held.inside:
                without(words[row], request.new.stop_ids)
        ended: list[tuple[Request, RequestFailed | None]] = []
        for row in over:
            request, matcher = requests[row], matchers[row]
            assert request is not None and matcher is not None
            failure = self._failure(self._held[request.new.handle]) if matcher.is_error() else None
            ended.append((request, failure))
        return words, ended

    def drop(self, handle: int) -> None:
        """Forget the grammar of a request that ends. Cancels its compilation if not begun and not needed by another."""
        held = self._held.pop(handle, None)
        self._compiling.pop(handle, None)
        if held is not None and all(other.future is not held.future for other in self._compiling.values()):
            if held.future.cancel():  # False once it has begun
                self._forget(held)

    def close(self) -> None:
        """Stop the compiling threads and cancel compilations that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _take_up(self, held: _Held) -> RequestFailed | None:
        error = held.future.exception() if held.future.done() else None
        if isinstance(error, InvalidParameter):
            return RequestFailed(str(error), code="invalid_grammar")
        if not held.future.done() or error is not None:
            self._forget(held)  # the next request tries again
        if not held.future.done():
            return RequestFailed(f"structured_outputs: the grammar was not compiled within {COMPILE_SECONDS:g} s: make "
                                 "it smaller, or try again when fewer are compiled.", code="invalid_grammar")
        if isinstance(error, RequestFailed):
            return RequestFailed(str(error), code=error.code)
        if error is not None:
            LOG.error("a grammar could not be compiled", exc_info=error)
            return RequestFailed("structured_outputs: the grammar could not be compiled: an internal error.",
                                 code="internal")
        grammar = held.future.result()
        held.matcher, held.after = grammar.fork(), grammar.after
        held.budget, held.closing, held.inside = grammar.budget, grammar.closing, grammar.inside
        held.names, held.patterns = None if grammar.names is None else Names(grammar.names), grammar.patterns
        return None

    def _trim(self) -> None:
        """Forget the least recently used grammars. A grammar that is still being compiled counts as one copy."""
        while len(self._cache) > 1 and sum(map(_copies, self._cache.values())) > KEPT:
            self._cache.popitem(last=False)

    def _failure(self, held: _Held) -> RequestFailed:
        """Return the failure of a matcher, and forget its grammar, so that new requests do not get it."""
        self._forget(held)
        assert held.matcher is not None
        return RequestFailed(f"structured_outputs: the grammar failed: {error_of(held.matcher)}", code="grammar_failed")

    def _forget(self, held: _Held) -> None:
        if self._cache.get(held.spec) is held.future:
            del self._cache[held.spec]


def _once(mask: I32, held: _Held) -> None:
    """Forbid tokens that repeat a name in a JSON object, or after which the name's pattern leaves no new name.

    When no other token is left, the new names have run out, and the repetition is allowed.
    """
    names, matcher, before = held.names, held.matcher, mask.copy()
    assert names is not None and matcher is not None
    without(mask, names.repeating())
    if held.patterns:
        known: dict[object, bool] = {}
        without(mask, [token for token in _again(mask, names) if not _goes_on(matcher, names, token, known)])
    if not mask.any():
        mask[:] = before


def _again(mask: I32, names: Names) -> list[int]:
    """Return the allowed tokens after which a name of the object may come again."""
    may = (token for token in names.leading() if mask[token // 32] >> token % 32 & 1)
    return [token for token in may if names.after(token).is_again()]


def _goes_on(matcher: "LLMatcher", names: Names, token: int, known: dict[object, bool]) -> bool:
    """True when the name that `token` begins can become a new name. `known`: answers for this mask, by place."""
    names = names.after(token)
    if (place := names.place()) not in known and len(known) < MOST_PLACES:
        matcher = matcher.deep_copy()
        matcher.consume_token(token)
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32).copy()
        without(mask, names.repeating())
        again = _again(mask, names)
        without(mask, again)
        known[place] = bool(mask.any()) or any(_goes_on(matcher, names, token, known) for token in again)
    return known.get(place, True)


def _copies(future: Future[Grammar]) -> int:
    """Return the number of copies of a grammar; 1 while it is not compiled, or when it cannot be."""
    return future.result().copies if future.done() and not future.cancelled() and not future.exception() else 1

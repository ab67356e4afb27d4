"""Grammars of live requests: compiled in threads beside the loop, then advanced by every confirmed token.

A request holds one matcher from its first mask to its end, preempted or not. Compiled grammars are kept for others.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.answers.grammar import MOST_COPIES, Grammar, GrammarCompiler, error_of, only, without
from quire.answers.json_names import Names
from quire.contracts.errors import InvalidParameter, QueueFull, RequestFailed
from quire.contracts.ngram import continuation
from quire.contracts.request import NewRequest, Request
from quire.contracts.step import I32

if TYPE_CHECKING:
    from llguidance import LLMatcher

LOG = logging.getLogger("quire")
THREADS = 2  # that compile grammars
COMPILE_SECONDS = 10.0  # of compiling; the time in the queue before does not count
MOST_WAITING = 64  # requests whose grammars are being compiled, or wait for it
KEPT = 64  # copies of compiled grammars, of at most 50 MB each (`quire.answers.grammar.LIMITS`)
MOST_PLACES = 64  # further masks computed for one mask, to see if a JSON name goes on; each takes about 0.1 ms
IDLE_SECONDS = 0.01  # between two checks of grammars that are being compiled, when there is nothing else to do


@dataclass
class _Held:
    """State of a request's grammar.

    after    bytes that end the reasoning; empty after its end;  before  last bytes of the output
    budget   tokens of reasoning that are left;  closing  tokens that are forced when the budget is used up
    names    names in the objects of a JSON output; None: the output is not JSON
    inside, patterns   as in `quire.answers.grammar.Grammar`
    last     (drafts, failure or None): if the next tokens are these drafts, no further one can follow, because of the
             failure if there is one; None: no such place is known
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
    last: tuple[tuple[int, ...], RequestFailed | None] | None = None

    @property
    def free(self) -> bool:
        """True in reasoning to which the grammar does not apply."""
        return bool(self.after) and not self.inside

    def copy(self) -> "_Held":
        """Return a copy, on which tokens can be tried."""
        matcher, names = self.matcher, self.names
        return replace(self, matcher=matcher and matcher.deep_copy(), names=names and names.copy())

    def consume(self, token: int, text: bytes) -> bool | None:
        """Advance by a token whose bytes are `text`. Returns True when no further token can follow, and None when the
        grammar does not allow the token."""
        if self.after:  # bytes of this token beyond the end of the reasoning are free, too
            self.closing = self.closing[self.budget <= 0 :]
            self.before, self.budget = self.before + text, self.budget - 1
            if self.after in self.before or not self.closing:
                self.after = b""
            self.before = self.before[-len(self.after) :]
            if not self.inside:
                return False
        if self.matcher is None:
            return False
        if not self.matcher.consume_token(token):
            return None
        if self.names is not None:
            self.names.add(text)
        return self.matcher.is_stopped()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as they are known."""
        if self.after and self.budget <= 0:
            return list(self.closing)
        return [] if self.matcher is None or self.free else self.matcher.compute_ff_tokens()

    def allows(self, token: int) -> bool:
        """True if the token may come next."""
        if self.after and self.budget <= 0:
            return token == self.closing[0]
        return self.matcher is None or self.free or self.matcher.validate_tokens([token]) == 1


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
            raise InvalidParameter(
                "structured_outputs needs a tokenizer, and this engine has none: start the engine "
                "without skip_tokenizer_init.",
                param="structured_outputs",
            )
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
        ended = held.consume(token, compiler.token_bytes(token))
        if ended is None:
            raise self._failure(held)
        if held.last is None:
            return ended
        path, failure = held.last
        held.last = (path[1:], failure) if path[:1] == (token,) else None
        if held.last is None or held.last[0]:  # the run is not that of the drafts, or goes on
            return ended
        if failure is not None:
            raise failure
        return True

    def guess(self, request: Request, skip: int, count: int, lookup: tuple[int, int]) -> list[int]:
        """Return at most `count` drafts for a request: tokens that its grammar forces, else those of n-grams.

        skip     number of tokens that steps in flight add; the drafts come behind them
        lookup   shortest and longest n-gram; (0, 0): none is looked up
        """
        compiler, held = self._compiler, self._held[request.new.handle].copy()
        assert compiler is not None
        found, ahead = list[int](), list[int]()
        while (missing := skip + count - len(found)) > 0:
            if not ahead or not held.allows(ahead[0]):
                ahead = held.forced() or _repeated(request, found, missing, lookup)
            if not ahead or not held.allows(ahead[0]):
                break
            token = ahead.pop(0)
            if held.consume(token, compiler.token_bytes(token)) is not False:
                break  # the last token needs no row behind it
            found.append(token)
        return found[skip:]

    def masks(
        self, rows: Sequence[tuple[Request | None, Sequence[int]]]
    ) -> tuple[I32, list[tuple[Request, RequestFailed | None]]]:
        """Return bit masks [R, words] of allowed tokens, and (request, failure or None) for requests that must end.

        A request ends when no token can follow its output, or when its grammar fails.

        rows   (request, drafts) of each slot, in order: it has a mask for its next token, and one behind each draft.
               The request is None if it has ended
        """
        assert self._compiler is not None
        states = [state for request, drafts in rows for state in self._states(request, drafts)]
        owners = [(request, tuple(drafts[:i])) for request, drafts in rows for i in range(1 + len(drafts))]
        matchers = [None if held is None or held.free else held.matcher for held in states]
        words, over = self._compiler.masks(matchers, [_enders(request, len(path)) for request, path in owners])
        for row, (held, (request, _)) in enumerate(zip(states, owners, strict=True)):
            if request is None or held is None:
                continue
            if held.names is not None and not held.after and row not in over:
                _once(words[row], held)
            if held.after and held.budget <= 0:
                only(words[row], held.closing[0])
            elif held.free:
                without(words[row], request.new.stop_ids)
        ended: list[tuple[Request, RequestFailed | None]] = []
        for row in reversed(over):
            (request, path), matcher = owners[row], matchers[row]
            assert request is not None and matcher is not None
            held = self._held[request.new.handle]
            failure = self._failure(held, matcher) if matcher.is_error() else None
            held.last = path, failure
            if not path:
                ended.append((request, failure))
        return words, ended[::-1]

    def _states(self, request: Request | None, drafts: Sequence[int]) -> list[_Held | None]:
        """Return the state of a request's grammar before each row of a step; None where anything may come: behind a
        draft that the grammar forbids, or behind the last token."""
        if request is None or self._compiler is None:
            return [None] * (1 + len(drafts))
        states: list[_Held | None] = [held := self._held[request.new.handle]]
        held.last = None
        for token in drafts:
            held = held.copy()
            states.append(held)
            if held.consume(token, self._compiler.token_bytes(token)) is not False:
                states[-1] = None
                break
        return states + [None] * (1 + len(drafts) - len(states))

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
            return RequestFailed(
                f"structured_outputs: the grammar was not compiled within {COMPILE_SECONDS:g} s: make "
                "it smaller, or try again when fewer are compiled.",
                code="invalid_grammar",
            )
        if isinstance(error, RequestFailed):
            return RequestFailed(str(error), code=error.code)
        if error is not None:
            LOG.error("a grammar could not be compiled", exc_info=error)
            return RequestFailed(
                "structured_outputs: the grammar could not be compiled: an internal error.", code="internal"
            )
        grammar = held.future.result()
        held.matcher, held.after = grammar.fork(), grammar.after
        held.budget, held.closing, held.inside = grammar.budget, grammar.closing, grammar.inside
        held.names, held.patterns = None if grammar.names is None else Names(grammar.names), grammar.patterns
        return None

    def _trim(self) -> None:
        """Forget the least recently used grammars. A grammar that is still being compiled counts as one copy."""
        while len(self._cache) > 1 and sum(map(_copies, self._cache.values())) > KEPT:
            self._cache.popitem(last=False)

    def _failure(self, held: _Held, matcher: "LLMatcher | None" = None) -> RequestFailed:
        """Return the failure of a matcher, by default the request's own. New requests do not get its grammar."""
        self._forget(held)
        matcher = matcher or held.matcher
        assert matcher is not None
        return RequestFailed(f"structured_outputs: the grammar failed: {error_of(matcher)}", code="grammar_failed")

    def _forget(self, held: _Held) -> None:
        if self._cache.get(held.spec) is held.future:
            del self._cache[held.spec]


def _enders(request: Request | None, ahead: int) -> Sequence[int]:
    """Return the tokens that may end the output of a request, `ahead` tokens after those that are confirmed."""
    if request is None or len(request.tokens) + ahead < request.new.sampler.min_length:
        return ()
    return request.new.stop_ids


def _repeated(request: Request, more: list[int], count: int, lookup: tuple[int, int]) -> list[int]:
    """Return `count` n-gram drafts behind the request's tokens and `more`; [] if no n-gram comes again."""
    if not lookup[1]:
        return []
    tokens = np.concatenate([np.frombuffer(request.tokens, np.int32), np.array(more, np.int32)])
    drafts: list[int] = continuation(tokens, count, *lookup).tolist()
    return drafts if drafts[0] >= 0 else []


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

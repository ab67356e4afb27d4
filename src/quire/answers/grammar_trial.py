"""Trial of grammars in a child process with limits of memory and time, with the same tokens.

llguidance runs out of stack on some grammars, which ends the process. It takes minutes for others, and nothing can
interrupt it. A grammar that the child survives is compiled again by the caller. There is one child per thread that
compiles. It is started on demand, and killed after a grammar that it did not finish.
"""

import marshal
import math
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.contracts.errors import RequestFailed
from quire.text.children import Child, Children, ask, limit_memory, limited, receive, send

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SECONDS = 5.0  # limit for one grammar
START_SECONDS = 60.0  # limit for the start of a child
MEMORY = 512 * 2**20  # limit of a child, in bytes
STEPS, STEP_SECONDS = 24, 0.5  # number of tokens that are tried, and CPU time limit of one
STACK = 1_500_000  # bytes; less than the stack of the core's threads, which compile the grammar later
Vocabulary = tuple[list[bytes], list[int], int]  # (tokens, special ids, end id)


class GrammarTrial:
    """Pool of child processes that test grammars of structured outputs. Each call of `run` has a child to itself."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._children = Children()

    def run(self, source: str, limits: dict[str, Any], vocabulary: Vocabulary) -> str:
        """Compile a grammar for llguidance in a child process and sample some tokens. Return its error; "" for none.
        Raises `RequestFailed` when the grammar ends the child or takes too long, or when no child can be started."""
        child = self._take(vocabulary)
        began = time.monotonic()
        with limited(child, self._seconds):
            answer = ask(child, marshal.dumps((source, limits)))
        if answer and time.monotonic() - began < self._seconds:  # else the timer may kill it now
            self._children.give(child)
            return str(marshal.loads(answer))
        self._children.end(child)
        what = f"more than {self._seconds:g} s" if time.monotonic() - began >= self._seconds else "too much memory"
        raise RequestFailed(
            f"structured_outputs: the grammar cannot be used: it takes {what}: make it smaller or less nested.",
            code="invalid_grammar",
        )

    def _take(self, vocabulary: Vocabulary) -> Child:
        code = f"import sys; sys.path[:] = {[*filter(None, sys.path)]!r}; from {__name__} import main; main()"
        child, used = self._children.take("-c", code)
        if used:
            return child
        with limited(child, START_SECONDS):
            ready = ask(child, marshal.dumps(vocabulary))
        if not ready:
            self._children.end(child)
            raise RequestFailed(
                "the process that tests grammars cannot be started: see the server's log.", code="internal"
            )
        return child


class _Tokens:
    """A vocabulary with the interface that llguidance expects. Texts are tokenized to single bytes."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = vocabulary
        self._ids = {token: i for i, token in reversed([*enumerate(self.tokens)]) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text.encode() if bytes([byte]) in self._ids]


def main() -> None:
    """Run the child process of a `GrammarTrial`: read a vocabulary, then test each grammar, from standard input."""
    from llguidance import LLTokenizer, TokenizerWrapper

    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    words = _Tokens(marshal.loads(receive(jobs)))
    tokens = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_token_id)
    threading.stack_size(STACK)
    pool = ThreadPoolExecutor(1)
    pool.submit(_try, tokens, '{"grammars":[{"lark_grammar":"start: /a/"}]}', {}).result()  # starts every thread
    limit_memory(MEMORY)
    send(answers, b"ready")
    while job := receive(jobs):
        signal.alarm(2 * math.ceil(SECONDS))  # ends this process if its caller is gone
        send(answers, marshal.dumps(pool.submit(_try, tokens, *marshal.loads(job)).result()))
        signal.alarm(0)


def _try(tokens: "LLTokenizer", source: str, limits: dict[str, Any]) -> str:
    """Compile a grammar and take some allowed tokens at random. Return the error; "" for none."""
    from llguidance import LLMatcher, LLParserLimits

    matcher, rng = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits(**limits)), random.Random(0)
    for step in range(STEPS):
        began, mask = time.process_time(), b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            error = str(matcher.get_error())
            return error if not step or " items" in error else ""  # else a random text may be the cause
        at = rng.choice([at for at, byte in enumerate(mask) if byte])
        token = 8 * at + rng.choice([bit for bit in range(8) if mask[at] >> bit & 1])
        if token == tokens.eos_token or not matcher.consume_token(token):
            break
        if time.process_time() - began > STEP_SECONDS:
            return f"a token of it takes more than {STEP_SECONDS:g} s: make it simpler"
    error = str(matcher.get_error())
    return error if " items" in error else ""

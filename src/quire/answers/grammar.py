"""Grammars: a structured output is compiled to a matcher, which says token by token which tokens may come next.

Knows `StructuredOutputsParams`, one tokenizer and llguidance, which is imported for the first grammar. Knows nothing of
requests and steps. There are limits for the size of a grammar, for its compilation, and for the time of one mask.
"""

import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire.answers.grammar_trial import GrammarTrial
from quire.answers.json_names import TokenIndex
from quire.answers.json_schema import MOST_OPTIONAL, Reading, holdable, holdable_in_lark
from quire.contracts.errors import InvalidParameter
from quire.contracts.step import I32
from quire.contracts.structured import StructuredOutputsParams
from quire.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.text.tokenizer import Tokenizer

MAX_GBNF = 16_384  # characters: conversion takes quadratic time (0.6 s), and nothing can interrupt it
LARK = re.compile(r"^\s*(%llguidance\b|[?!]*start\b[^:\n]*:(?!:=))", re.M)  # its first rule, however modified
LAYOUT = r" ?(\r?\n[ \t]{0,60})?"  # white space between the parts of JSON: all usual styles, with a limit
MAX_REASON = 500  # characters of a grammar's error message
# A grammar is compiled once per thread, but not longer than COPIES_SECONDS: matchers of one copy share a lock.
# Each copy caches lexer states, up to 50 MB (LIMITS).
MOST_COPIES, COPIES_SECONDS = 8, 0.02
LEFT_OUT = re.compile(r"\btail\d+_\d+\)?\?")  # an optional argument, as `tool_grammar` writes it
WIDE = re.compile(r"row has \d+ items|Too many items")  # in error messages of llguidance
TAGS = str((REASONING_FORMATS, TOOL_FORMATS))  # a text that contains all tags
# Limits of llguidance.
# max_items_in_row   a token of an ambiguous grammar takes at most 0.5 s, instead of 6 s
# step_max_items     high: an object of 100 optional strings needs 200,000 items with a vocabulary of 150,000
# max_grammar_size   an object of many properties (3 to 8 symbols each) takes at most 3 s, instead of minutes
# max_lexer_states   a state takes 1 kB
LIMITS: dict[str, Any] = {
    "step_max_items": 200_000, "max_items_in_row": 600, "max_lexer_states": 50_000, "max_grammar_size": 20_000,
    "initial_lexer_fuel": 500_000, "verbose_errors": False,
}  # fmt: skip


@dataclass(frozen=True)
class Grammar:
    """A compiled structured output.

    fork       makes a matcher for one request's output; returns None when only a reasoning budget is set
    after      bytes that end the reasoning before the structured output; b"" = no reasoning
    budget     maximum tokens of reasoning; then the tokens `closing` are forced
    closing    tokens of `after`
    inside     True = the grammar applies to the reasoning, too
    copies     number of compiled copies; matchers of one copy share a lock, so one of them runs at a time
    names      token index to prevent repeated property names in JSON objects; None = the output is not JSON
    patterns   True = the schema has patternProperties, which may allow only few names
    """

    fork: Callable[[], "LLMatcher | None"]
    after: bytes
    budget: float = math.inf
    closing: tuple[int, ...] = ()
    inside: bool = False
    copies: int = 1
    names: TokenIndex | None = None
    patterns: bool = False


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer for llguidance. `end`: a token id that no text has; its bit in a mask means that the text may end."""

    tokenizer: "Tokenizer"
    words: "_Words"
    tokens: "LLTokenizer"
    end: int


class _Words:
    """A tokenizer with the interface that llguidance expects.

    llguidance's own reader of tokenizer.json takes every added token like <think> for special, and forbids it even
    where a grammar asks for it. Here only the tokenizer's special tokens are special, except the tags of calls and
    reasoning, which are special in some vocabularies and not in others.
    """

    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", size: int, end: int) -> None:
        self._encode, self.eos_token_id = tokenizer.encode, end
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = [
            i for i in sorted(tokenizer.all_special_ids) if i == end or tokenizer.token_text(i) not in TAGS
        ]
        special = {*self.special_token_ids}
        byte_ids = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in special}
        self._spelled = {
            i: [byte_ids[byte] for byte in self.tokens[i]]
            for i in special
            if self.tokens[i] and byte_ids.keys() >= {*self.tokens[i]}
        }

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text in a grammar. A special token in it is spelled byte by byte, as text."""
        ids = self._encode(text, False)
        return [one for i in ids for one in self._spelled.get(i, (i,))]


class GrammarCompiler:
    """Compiler of structured outputs for a model. `compile` may run in several threads, beside `masks` in one thread.

    load         loads the tokenizer; called for the first grammar
    vocab_size   size of the model's vocabulary; ids beyond the tokenizer's are always forbidden
    trial        tries a grammar in a child process before it is compiled here; None = no trial, and a grammar that
                 takes too much stack or time harms this process
    threads      number of threads that compute masks
    """

    def __init__(
        self, load: "Callable[[], Tokenizer]", vocab_size: int, trial: GrammarTrial | None = None, threads: int = 1
    ) -> None:
        self._load, self._vocab_size, self._trial, self._threads = load, vocab_size, trial, threads
        self._lock = threading.Lock()
        self._made: _Vocabulary | None = None
        self._indexed: TokenIndex | None = None
        self._executor: LLExecutor | None = None

    def compile(self, spec: str, most_copies: int = MOST_COPIES) -> Grammar:
        """Compile `spec`, the text that `StructuredOutputsParams.spec` returns. Raises `InvalidParameter`.
        `most_copies`: limit of compiled copies, which let as many threads compute masks at once."""
        from llguidance import LLMatcher, LLParserLimits

        structured = msgspec.json.decode(spec, type=StructuredOutputsParams)
        vocabulary = self._vocabulary()
        closing = tuple(vocabulary.tokenizer.encode(structured.after, False)) if structured.after else ()
        if structured.after and not closing:
            raise _refusal("the model's tokenizer turns `after` into no tokens: give another text")
        reasoning = (
            (structured.after or "").encode(),
            math.inf if structured.budget is None else structured.budget,
            closing,
            structured.inside,
        )
        if not structured.given:
            return Grammar(lambda: None, *reasoning)
        reading = Reading()
        source, words = _source(structured, reading), vocabulary.words
        bounds = _limits(reading)
        if self._trial and (
            error := self._trial.run(source, bounds, (words.tokens, words.special_token_ids, vocabulary.end))
        ):
            raise _refusal(_reason(error))
        until, limits = time.perf_counter() + COPIES_SECONDS, LLParserLimits(**bounds)
        copies = [matcher := LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)]
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails for a grammar that no text matches
        if matcher.is_error():
            raise _refusal(error_of(matcher))
        while len(copies) < min(self._threads, most_copies) and time.perf_counter() < until:
            copies.append(LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits))
        turn = itertools.cycle(copies)
        names = self._index() if structured.json is not None or structured.json_object else None
        return Grammar(
            lambda: next(turn).deep_copy(), *reasoning, copies=len(copies), names=names, patterns=reading.patterns
        )

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; special tokens have bytes, too."""
        return self._vocabulary().tokenizer.token_bytes(token)

    def masks(self, matchers: "Sequence[LLMatcher | None]", enders: Sequence[Sequence[int]]) -> tuple[I32, list[int]]:
        """Compute the masks of the tokens that may come next, in parallel. Return (masks, ended rows).

        matchers     one per row (request); None = any token may come
        enders       per row, end-of-sequence and stop ids, which may come where the grammar allows the end
        masks        [R, ceil(V / 32)] int32 bit masks, see `Executor.release`
        ended rows   rows whose grammar allows no further token, or whose matcher has an error
        """
        width, vocabulary = -(-self._vocab_size // 32), self._vocabulary()
        words = -(-vocabulary.tokens.vocab_size // 32)
        out = np.full((len(matchers), words), -1, np.int32)
        rows = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
        if rows:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._threads)
            self._executor.unsafe_compute_mask_ptr(rows, out.ctypes.data, 4 * words, len(out))
        over = []
        end, bit = vocabulary.end // 32, np.int32(np.uint32(1 << vocabulary.end % 32).view(np.int32))
        for matcher, row in rows:
            mask, may_end = out[row], bool(out[row, end] & bit)
            mask[end] &= ~bit
            if may_end and (matcher.is_error() or not mask.any()):
                over.append(row)
                mask[:] = -1
            elif may_end:
                np.bitwise_or.at(mask, *_bits(enders[row]))
        return np.ascontiguousarray(out[:, :width]), over

    def _index(self) -> TokenIndex:
        """Return the token index. Made without the lock, since masks would wait 0.3 s; two threads may both make it."""
        self._indexed = self._indexed or TokenIndex(self._vocabulary().words.tokens[: self._vocab_size])
        return self._indexed

    def _vocabulary(self) -> _Vocabulary:
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                tokenizer = self._load()
                if tokenizer.bytes_table is None:
                    raise InvalidParameter(
                        "structured_outputs: grammars are not implemented for the kind of this "
                        "model's tokenizer: leave structured_outputs out.",
                        param="structured_outputs",
                    )
                end = tokenizer.eos_token_id
                if end is None:
                    end = min(tokenizer.all_special_ids, default=tokenizer.vocab_size - 1)
                size = max(self._vocab_size, tokenizer.vocab_size)
                words = _Words(tokenizer, size, end)
                tokens = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=end)
                self._made = _Vocabulary(tokenizer, words, tokens, end)
            return self._made


def only(mask: I32, token: int) -> None:
    """Change a bit mask, in place, so that it allows only `token`."""
    mask[:] = 0
    np.bitwise_or.at(mask, *_bits((token,)))


def without(mask: I32, tokens: Sequence[int]) -> None:
    """Change a bit mask, in place, so that it also forbids `tokens`."""
    words, bits = _bits(tokens)
    np.bitwise_and.at(mask, words, ~bits)


def _bits(tokens: Sequence[int]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], I32]:
    """Return the positions of tokens in a mask: indices of words, and the bit in each word."""
    ids = np.array(tokens, np.int64)
    return ids // 32, (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)


def error_of(matcher: "LLMatcher") -> str:
    """Return the error message of a matcher; "" without an error."""
    return _reason(matcher.get_error())


def _reason(error: str) -> str:
    error = error.replace("<non-verbose/>", "").strip()
    if WIDE.search(error):
        return f"too many ways to go on are open at once ({error[:MAX_REASON]}): require more properties, or send less"
    return "no text can match it" if error == "NoExtensionBias" else error[:MAX_REASON]


def _refusal(reason: str) -> InvalidParameter:
    return InvalidParameter(f"structured_outputs: the grammar cannot be used: {reason}", param="structured_outputs")


def notes(structured: StructuredOutputsParams) -> list[str]:
    """Return the JSON schema keywords that are not enforced, each with its path. Raises `InvalidParameter`."""
    reading = Reading()
    if structured.json is not None or structured.grammar is not None and "%json" in structured.grammar:
        _source(msgspec.json.decode(structured.spec(), type=StructuredOutputsParams), reading)
    return [*dict.fromkeys(reading.notes)]


def _limits(reading: Reading) -> dict[str, Any]:
    """Return LIMITS, raised for optional properties: at the beginning of an object, each of them may come next."""
    places = min(reading.optional, MOST_OPTIONAL)
    return LIMITS | {
        "max_items_in_row": LIMITS["max_items_in_row"] + 4 * places,
        "step_max_items": LIMITS["step_max_items"] + 2_000 * places,
    }


def _source(structured: StructuredOutputsParams, reading: Reading) -> str:
    """Return the grammar for llguidance. `reading` collects findings about its schemas."""
    if structured.regex is not None:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        if not structured.choice:
            raise _refusal("choice is empty")
        quoted = (json.dumps(word).replace("\x7f", "\\u007f") for word in structured.choice)  # only ASCII is left
        words = " | ".join(quoted)
        return _grammar("lark_grammar", f"start: CHOICE\nCHOICE: {words}")
    if structured.grammar is not None:
        reading.optional += len(LEFT_OUT.findall(structured.grammar))
        return _grammar("lark_grammar", holdable_in_lark(_lark(structured.grammar), reading))
    schema: Any = {"type": "object"} if structured.json_object else structured.json
    try:
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise _refusal(f"json is not valid JSON: {error}") from None
    if schema is False:
        raise _refusal("json is false, which no text matches: send a schema.")
    schema = {} if schema is True else holdable(schema, reading)
    if isinstance(schema, dict) and isinstance(own := schema.get("x-guidance", {}), dict):
        layout = {"whitespace_flexible": False} if structured.disable_any_whitespace else {"whitespace_pattern": LAYOUT}
        schema = schema | {"x-guidance": layout | own}
    return _grammar("json_schema", schema)


def _grammar(kind: str, source: object) -> str:
    return msgspec.json.encode({"grammars": [{kind: source}]}).decode()


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = "\n".join(filter(str.strip, text.split("\n")))  # empty lines cost the converter quadratic time
    if LARK.search(text):
        return text
    if len(text) > MAX_GBNF:
        raise _refusal(f"it has {len(text)} characters, and GBNF may have {MAX_GBNF}: write it in Lark's syntax")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare Exception
        raise _refusal(
            "it is not Lark, because it has no rule named start, and read as GBNF it fails "
            f"({error}): add a rule `start: ...`, or correct the GBNF"
        ) from None

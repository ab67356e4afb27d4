"""Grammars: the form that an output must have becomes what says, token by token, which tokens may come next.

Knows forms, one tokenizer and llguidance, which is imported when the first form comes. Knows nothing of requests and
steps. Whatever a caller sends is bounded: in size, in what compiling it takes, and in what one mask takes.
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

from quire.contracts.errors import InvalidParameter
from quire.contracts.step import I32
from quire.contracts.structured import StructuredOutputsParams
from quire.text.grammar_trial import GrammarTrial
from quire.text.json_names import TokenIndex
from quire.text.json_schema import MOST_OPTIONAL, Reading, holdable, holdable_in_lark
from quire.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.text.tokenizer import Tokenizer

MAX_GBNF = 16_384  # characters: rewriting takes the square of their number (0.6 s), and nothing can interrupt it
LARK = re.compile(r"^\s*(%llguidance\b|[?!]*start\b[^:\n]*:(?!:=))", re.M)  # its first rule, however modified
LAYOUT = r" ?(\r?\n[ \t]{0,60})?"  # between the parts of JSON: as it is printed in any style, but without end
MAX_REASON = 500  # characters of what is wrong with a grammar
# A form is compiled as often as there are threads, as often as is asked for at most, for up to COPIES_SECONDS.
# Each copy grows with what its outputs find out, to 50 MB at most (LIMITS).
MOST_COPIES, COPIES_SECONDS = 8, 0.02
LEFT_OUT = re.compile(r"\btail\d+_\d+\)?\?")  # an argument that may be left out, as `tool_grammar` writes them
WIDE = re.compile(r"row has \d+ items|Too many items")  # in an error
TAGS = str((REASONING_FORMATS, TOOL_FORMATS))  # a text with all of them
# Of llguidance: a token of an ambiguous grammar takes 0.5 s at most and not 6 s, by the items in a row (those of a step
# may be many: an object of 100 optional strings needs 200,000 in a vocabulary of 150,000); an object of many properties
# (3 to 8 symbols each, and time is worse than linear) 3 s and not minutes; a state takes 1 kB.
LIMITS: dict[str, Any] = {
    "step_max_items": 200_000, "max_items_in_row": 600, "max_lexer_states": 50_000, "max_grammar_size": 20_000,
    "initial_lexer_fuel": 500_000, "verbose_errors": False,
}  # fmt: skip


@dataclass(frozen=True)
class Grammar:
    """A compiled form. `fork` makes the matcher of one output (None: only its reasoning is held to something); those of
    one copy of the form share what they find out about it, and a lock: only one of them moves at a time.

    after    bytes that end the reasoning before the form; b"": there is none
    budget   tokens of reasoning, then `closing`, the tokens of `after`, are forced
    inside   the form holds in the reasoning, too
    copies   how many there are
    names    the tokens of a form of JSON, whose objects have no name twice; None: it is another form
    patterns   names have patterns, which may leave only few
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
    """A tokenizer as llguidance sees it. `end`: an id that no text has, whose bit says that the text may end here."""

    tokenizer: "Tokenizer"
    words: "_Words"
    tokens: "LLTokenizer"
    end: int


class _Words:
    """A tokenizer in llguidance's terms. Reading a tokenizer.json by itself, it has every added token that looks like
    <think> for one that no text holds, and yet masks that ask for it; here those are special, but for tags of calls and
    reasoning, which vocabularies have as either."""

    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", size: int, end: int) -> None:
        self._encode, self.eos_token_id = tokenizer.encode, end
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = [i for i in sorted(tokenizer.all_special_ids)
                                  if i == end or tokenizer.token_text(i) not in TAGS]
        special = {*self.special_token_ids}
        byte_ids = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in special}
        self._spelled = {i: [byte_ids[byte] for byte in self.tokens[i]] for i in special
                         if self.tokens[i] and byte_ids.keys() >= {*self.tokens[i]}}

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that a form asks for. A special token that it spells is text, byte by byte."""
        ids = self._encode(text, False)
        return [one for i in ids for one in self._spelled.get(i, (i,))]


class GrammarCompiler:
    """Compiles forms for a model. `compile` may run in several threads at once, beside `masks` in one.

    load   the tokenizer, called when the first form comes;  vocab_size  of the model: it may be wider than the
           tokenizer's, whose ids are then the only ones that may come
    trial  where a form is tried before it is compiled here; None: nowhere, and one that hurts hurts this process
    threads   that compute masks
    """

    def __init__(self, load: "Callable[[], Tokenizer]", vocab_size: int, trial: GrammarTrial | None = None,
                 threads: int = 1) -> None:
        self._load, self._vocab_size, self._trial, self._threads = load, vocab_size, trial, threads
        self._lock = threading.Lock()
        self._made: _Vocabulary | None = None
        self._indexed: TokenIndex | None = None
        self._executor: LLExecutor | None = None

    def compile(self, spec: str, most_copies: int = MOST_COPIES) -> Grammar:
        """The grammar of `StructuredOutputsParams.spec`, in at most `most_copies`; raises `InvalidParameter` that says
        what is wrong with it."""
        from llguidance import LLMatcher, LLParserLimits

        form = msgspec.json.decode(spec, type=StructuredOutputsParams)
        vocabulary = self._vocabulary()
        closing = tuple(vocabulary.tokenizer.encode(form.after, False)) if form.after else ()
        if form.after and not closing:
            raise _refusal("after is no text in this model's tokens")
        reasoning = ((form.after or "").encode(), math.inf if form.budget is None else form.budget, closing,
                     form.inside)
        if not form.given:
            return Grammar(lambda: None, *reasoning)
        reading = Reading()
        source, words = _source(form, reading), vocabulary.words
        bounds = _limits(reading)
        if self._trial and (
                error := self._trial.run(source, bounds, (words.tokens, words.special_token_ids, vocabulary.end))):
            raise _refusal(_reason(error))
        until, limits = time.perf_counter() + COPIES_SECONDS, LLParserLimits(**bounds)
        copies = [matcher := LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)]
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that no text matches is found out here
        if matcher.is_error():
            raise _refusal(error_of(matcher))
        while len(copies) < min(self._threads, most_copies) and time.perf_counter() < until:
            copies.append(LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits))
        turn = itertools.cycle(copies)
        names = self._index() if form.json is not None or form.json_object else None
        return Grammar(lambda: next(turn).deep_copy(), *reasoning, copies=len(copies), names=names,
                       patterns=reading.patterns)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, special ones included."""
        return self._vocabulary().tokenizer.token_bytes(token)

    def masks(self, matchers: "Sequence[LLMatcher | None]", enders: Sequence[Sequence[int]]) -> tuple[I32, list[int]]:
        """The masks [R, ceil(V / 32)] int32 of the tokens that may come next, see `Executor.release`; computed in
        parallel. And the rows that are over: a text that nothing can follow, or a matcher with an error.

        matchers   one per row; None: any token may come;  enders  ids that may come where the text may end
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
        """Made without the lock, for which masks would wait 0.3 s: two threads may both make it."""
        self._indexed = self._indexed or TokenIndex(self._vocabulary().words.tokens[: self._vocab_size])
        return self._indexed

    def _vocabulary(self) -> _Vocabulary:
        with self._lock:
            if self._made is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                tokenizer = self._load()
                if tokenizer.pieces is None:
                    raise InvalidParameter("structured_outputs: this model's tokenizer is of a kind that grammars are "
                                           "not implemented for.", param="structured_outputs")
                end = tokenizer.eos_token_id
                if end is None:
                    end = min(tokenizer.all_special_ids, default=tokenizer.vocab_size - 1)
                size = max(self._vocab_size, tokenizer.vocab_size)
                words = _Words(tokenizer, size, end)
                tokens = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=end)
                self._made = _Vocabulary(tokenizer, words, tokens, end)
            return self._made


def only(mask: I32, token: int) -> None:
    """Let nothing come but one token."""
    mask[:] = 0
    np.bitwise_or.at(mask, *_bits((token,)))


def without(mask: I32, tokens: Sequence[int]) -> None:
    """Let these tokens not come."""
    words, bits = _bits(tokens)
    np.bitwise_and.at(mask, words, ~bits)


def _bits(tokens: Sequence[int]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], I32]:
    """Where the bits of tokens are in a mask: words, and the bit in each."""
    ids = np.array(tokens, np.int64)
    return ids // 32, (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)


def error_of(matcher: "LLMatcher") -> str:
    """What a matcher met, in words; "" for one that is sound."""
    return _reason(matcher.get_error())


def _reason(error: str) -> str:
    error = error.replace("<non-verbose/>", "").strip()
    if WIDE.search(error):
        return f"too many ways to go on are open at once ({error[:MAX_REASON]}): require more properties, or send less"
    return "no text can match it" if error == "NoExtensionBias" else error[:MAX_REASON]


def _refusal(reason: str) -> InvalidParameter:
    return InvalidParameter(f"structured_outputs: the grammar cannot be used: {reason}", param="structured_outputs")


def notes(form: StructuredOutputsParams) -> list[str]:
    """Keywords of the form's schemas that are not enforced, each with its path. Errors: `InvalidParameter`."""
    reading = Reading()
    if form.json is not None or form.grammar is not None and "%json" in form.grammar:
        _source(msgspec.json.decode(form.spec(), type=StructuredOutputsParams), reading)
    return [*dict.fromkeys(reading.notes)]


def _limits(reading: Reading) -> dict[str, Any]:
    """LIMITS, with room for properties that may be left out: where an object begins, each of them may come."""
    places = min(reading.optional, MOST_OPTIONAL)
    return LIMITS | {"max_items_in_row": LIMITS["max_items_in_row"] + 4 * places,
                     "step_max_items": LIMITS["step_max_items"] + 2_000 * places}


def _source(form: StructuredOutputsParams, reading: Reading) -> str:
    """The form as llguidance takes it; `reading` learns of its schemas."""
    if form.regex is not None:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        if not form.choice:
            raise _refusal("choice is empty")
        words = " | ".join(json.dumps(word).replace("\x7f", "\\u007f") for word in form.choice)  # only ASCII is left
        return _grammar("lark_grammar", f"start: CHOICE\nCHOICE: {words}")
    if form.grammar is not None:
        reading.optional += len(LEFT_OUT.findall(form.grammar))
        return _grammar("lark_grammar", holdable_in_lark(_lark(form.grammar), reading))
    schema: Any = {"type": "object"} if form.json_object else form.json
    try:
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise _refusal(f"json is no JSON: {error}") from None
    if schema is False:
        raise _refusal("json is false, which no text matches: send a schema.")
    schema = {} if schema is True else holdable(schema, reading)
    if isinstance(schema, dict) and isinstance(own := schema.get("x-guidance", {}), dict):
        layout = {"whitespace_flexible": False} if form.disable_any_whitespace else {"whitespace_pattern": LAYOUT}
        schema = schema | {"x-guidance": layout | own}
    return _grammar("json_schema", schema)


def _grammar(kind: str, source: object) -> str:
    return msgspec.json.encode({"grammars": [{kind: source}]}).decode()


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = "\n".join(filter(str.strip, text.split("\n")))  # many empty lines cost it the square of their number
    if LARK.search(text):
        return text
    if len(text) > MAX_GBNF:
        raise _refusal(f"in GBNF it may have {MAX_GBNF} characters, not {len(text)}: write it in Lark's syntax")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare Exception
        raise _refusal(f"it is neither Lark (with a rule start: ...) nor GBNF (root ::= ...): {error}") from None

"""Sampling parameters: those of a caller (`SamplingParams`), and those that reach the device (`SamplerSpec`)."""

import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter, listed, shown
from quire.contracts.structured import StructuredOutputsParams
from quire.contracts.unknown_fields import StrictFields, known_fields

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as users of the field expect
COLDEST = 0.01  # temperatures between greedy and this are raised to it: logits / t would overflow
MAX_N = 16_384
MAX_LOGPROB_IDS = 128
BIAS_LIMIT = 100.0
REPETITION_RANGE = (0.01, 100)  # logits are multiplied or divided by it, in float32
LENGTH_PENALTY_LIMIT = 10  # exponent of a length: with 10, no context length overflows a float


class OutputKind(IntEnum):
    """Content of each streamed output: all text so far, the new text, or only the final output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class DrawParams(msgspec.Struct, metaclass=StrictFields, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The numbers by which `SamplingParams` draw tokens.

    n                     completions per prompt, 1..16384; equal ones when greedy
    temperature           0 = greedy; [0, 2]
    top_p / top_k / min_p (0, 1] / -1 or 0 = off / [0, 1]
    *_penalty             presence and frequency in [-2, 2]; repetition in [0.01, 100], 1 = off
    seed                  same logits and seed give the same token; None = drawn by the engine
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


class SamplingParams(DrawParams, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of a request. Out-of-range values and unknown fields raise `InvalidParameter`.

    n, seed, temperature, penalties, ...   see `DrawParams`
    stop / stop_token_ids strings (matched on the text) / ids (matched by the engine)
    max_tokens            None = to the end of the context; 0 = only score the prompt
    logprobs, prompt_logprobs   k alternatives per token; -1 = the whole vocabulary
    shown_special_ids     special tokens that stay in the text although skip_special_tokens removes the others
    structured_outputs    the grammar of the output; generation ends when the grammar allows no further token
    kv_chunks             [first token, end] of parts of the prompt, which reuse KV of the same tokens cached alone;
                          None = the parts between separators
    blend_ratio           share of the tokens so reused that is computed again; None = the engine's
    logits_processors     functions that change the logits of the next token, in `LLM`: of (output ids, logits [V]), or
                          of (prompt ids, output ids, logits [V]); each returns logits. Logprobs are those of the
                          changed logits, and no drafts are verified
    speculative_tokens    drafts that a step verifies, at most; 0 = no speculation; None = as many as the engine drafts
    kv_transfer_params    disaggregation of prefill and decode, see `entry/transfer.py`
    """

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_ids: list[int] | None = None
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    speculative_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_chunks: list[list[int]] | None = None
    blend_ratio: float | None = None
    logits_processors: list[Any] | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def hides_special_tokens(self) -> bool:
        """True when special tokens are left out of the text.

        Special tokens stay in structured output: without them the text may break its grammar (JSON strings can hold
        reasoning tags).
        """
        return self.skip_special_tokens and not (self.structured_outputs and self.structured_outputs.given)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def check(self) -> None:
        """Raise `InvalidParameter` for the first value out of its range (fields can be assigned after creation)."""
        _check_numbers(self)
        _check_text(self)
        _check_ids(self)

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with some fields replaced."""
        return msgspec.structs.replace(self, **known_fields(type(self), changes))


def _refuse(param: str, value: object, allowed: str) -> None:
    raise InvalidParameter(f"{param}={shown(value)} is out of range: {param} must be {allowed}.", param=param)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Ranges = Mapping[str, tuple[Callable[[object], bool], float, float, str]]  # field -> check, bounds, in words
RANGES: Ranges = {
    "presence_penalty": (_is_number, -2.0, 2.0, "a number in [-2, 2]"),
    "frequency_penalty": (_is_number, -2.0, 2.0, "a number in [-2, 2]"),
    "repetition_penalty": (_is_number, *REPETITION_RANGE, "a number in [{}, {}]".format(*REPETITION_RANGE)),
    "temperature": (_is_number, 0.0, 2.0, "a number in [0, 2]"),
    "top_p": (_is_number, math.ulp(0.0), 1.0, "a number in (0, 1]"),
    "top_k": (_is_int, -1, math.inf, "an integer >= -1 (0 and -1 mean off)"),
    "min_p": (_is_number, 0.0, 1.0, "a number in [0, 1]"),
    "n": (_is_int, 1, MAX_N, f"an integer in [1, {MAX_N}]"),
    "min_tokens": (_is_int, 0, math.inf, "an integer >= 0"),
}
OPTIONAL: Ranges = {  # may be None
    "seed": (_is_int, -1, 2**64 - 1, "an integer in [0, 2^64), or -1 or None for a random one"),
    "max_tokens": (_is_int, 0, math.inf, "an integer >= 0, or None for the rest of the context"),
    "stream_interval": (_is_int, 1, math.inf, "an integer >= 1"),
    "blend_ratio": (_is_number, 0.0, 1.0, "a number in [0, 1]"),
    "speculative_tokens": (_is_int, 0, math.inf, "an integer >= 0 (0 means no speculation)"),
    "logprobs": (_is_int, -1, math.inf, "an integer >= -1 (-1 means the whole vocabulary)"),
    "prompt_logprobs": (_is_int, -1, math.inf, "an integer >= -1 (-1 means the whole vocabulary)"),
}
BEAM_RANGES: Ranges = {
    "beam_width": (_is_int, 1, math.inf, "an integer >= 1"),
    "max_tokens": (_is_int, 1, math.inf, "an integer >= 1"),
    "temperature": (_is_number, 0.0, 0.0, "0, because a beam search does not sample"),
    "length_penalty": (
        _is_number,
        -LENGTH_PENALTY_LIMIT,
        LENGTH_PENALTY_LIMIT,
        f"a number in [-{LENGTH_PENALTY_LIMIT}, {LENGTH_PENALTY_LIMIT}]",
    ),
}


def _check_ranges(record: msgspec.Struct, ranges: Ranges, optional: bool = False) -> None:
    for name, (fits, least, most, words) in ranges.items():
        value = getattr(record, name)
        if not (optional and value is None) and not (fits(value) and least <= value <= most):
            _refuse(name, value, words)


def _check_numbers(p: SamplingParams) -> None:
    _check_ranges(p, RANGES)
    _check_ranges(p, OPTIONAL, optional=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _refuse("min_tokens", p.min_tokens, f"at most max_tokens ({p.max_tokens})")


def _check_text(p: SamplingParams) -> None:
    for name, value in (("stop", p.stop), ("bad_words", p.bad_words)):
        words = [value] if isinstance(value, str) and name == "stop" else value
        if words is None:
            continue
        if not isinstance(words, (list, tuple)) or any(not isinstance(w, str) or not w for w in words):
            text = "a non-empty string or a list" if name == "stop" else "a list"
            _refuse(name, value, f"{text} of non-empty strings")
    if p.stop and not p.detokenize:
        raise InvalidParameter(
            "stop strings are matched on text: set detokenize=True, or use stop_token_ids.", param="stop"
        )
    functions: Any = p.logits_processors  # the caller may have given any type
    if functions is not None and not (isinstance(functions, list | tuple) and all(map(callable, functions))):
        _refuse("logits_processors", functions, "a list of functions")
    for name, kind in type(p).__annotations__.items():
        if kind is bool and not isinstance(getattr(p, name), bool):
            _refuse(name, getattr(p, name), "True or False")
    structured: Any = p.structured_outputs  # the caller may have given any type
    if not isinstance(structured, StructuredOutputsParams | None):
        _refuse("structured_outputs", structured, "a StructuredOutputsParams, or None")
    if p.output_kind not in tuple(OutputKind):
        _refuse("output_kind", p.output_kind, "one of OutputKind.CUMULATIVE, DELTA and FINAL_ONLY")


def _check_ids(p: SamplingParams) -> None:
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "shown_special_ids"):
        value = getattr(p, name)
        if value is None:
            continue
        if not isinstance(value, (list, tuple, set, frozenset)) or any(not _is_int(i) or i < 0 for i in value):
            _refuse(name, value, "a list of token ids >= 0")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        _refuse("allowed_token_ids", p.allowed_token_ids, "non-empty: nothing could be sampled")
    if p.logprob_token_ids is not None:
        if len(p.logprob_token_ids) > MAX_LOGPROB_IDS:
            _refuse("logprob_token_ids", f"{len(p.logprob_token_ids)} ids", f"at most {MAX_LOGPROB_IDS} ids")
        if p.logprobs is not None and p.logprobs != len(p.logprob_token_ids):
            count = len(p.logprob_token_ids)
            _refuse("logprobs", p.logprobs, f"the number of logprob_token_ids ({count}) when both are set")
    _check_chunks(p.kv_chunks)
    pairs: Any = p.logit_bias or {}  # the caller may have given any type
    words = "a map from token ids to finite numbers (clamped to [-100, 100])"
    if not isinstance(pairs, dict):
        _refuse("logit_bias", pairs, words)
    if wrong := [i for i, bias in pairs.items() if not _is_int(i) or i < 0 or not _is_number(bias)]:
        raise InvalidParameter(
            f"logit_bias at {listed(wrong)} is out of range: logit_bias must be {words}.", param="logit_bias"
        )


def _check_chunks(chunks: Any) -> None:
    """Raise `InvalidParameter` unless `kv_chunks` is None or a list of pairs in ascending order."""
    words = "a list of pairs [first token, end] in ascending order"
    if not isinstance(chunks, list | tuple | None):
        _refuse("kv_chunks", chunks, words)
    end = 0
    for at, one in enumerate(chunks or ()):
        pair = tuple(one) if isinstance(one, list | tuple) else ()
        if len(pair) != 2 or not all(map(_is_int, pair)) or not end <= pair[0] < pair[1]:
            given = shown([*one] if isinstance(one, tuple) else one)
            raise InvalidParameter(
                f"kv_chunks at {at} is {given}: kv_chunks must be {words}, here with {end} <= first token < end.",
                param="kv_chunks",
            )
        end = pair[1]


class BeamSearchParams(msgspec.Struct, metaclass=StrictFields, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a beam search: `beam_width` hypotheses, ranked by logprob / length ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_ranges(self, BEAM_RANGES)


class SamplerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a request that the sampler on the device needs, as ids and numbers only.

    seed           Philox key, uint64; with n > 1 the completion's own, from `child_seed`
    num_prompt     length of the prompt; penalties use it to separate prompt tokens from output tokens
    min_length     below this sequence length `stop_ids` cannot be sampled (num_prompt + min_tokens)
    logit_bias     (token id, bias) pairs, biases clamped to [-100, 100]
    bad_words      token sequences; the last token of each is forbidden after the tokens before it
    num_logprobs   None = none, -1 = the whole vocabulary; the same for num_prompt_logprobs
    grammar        True: the request's rows wait for a mask of the allowed tokens (`StepPlan.grammar`)
    """

    seed: int
    num_prompt: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_length: int = 0
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    grammar: bool = False

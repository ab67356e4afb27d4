"""Values that `SamplingParams` accepts and refuses: every field, with its range in the message."""

import math
import re
from typing import Any

import msgspec
import pytest

from quire.contracts.errors import InvalidParameter
from quire.contracts.sampling import (
    MAX_LOGPROB_IDS,
    MAX_N,
    BeamSearchParams,
    OutputKind,
    SamplerSpec,
    SamplingParams,
)
from quire.contracts.structured import StructuredOutputsParams
from quire.contracts.unknown_fields import REFUSED

DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "shown_special_ids": None,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": OutputKind.CUMULATIVE,
    "stream_interval": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "skip_reading_prefix_cache": False,
    "structured_outputs": None,
    "speculative_tokens": None,
    "kv_transfer_params": None,
    "kv_chunks": None,
    "blend_ratio": None,
    "logits_processors": None,
}
UNBOUNDED = {
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "skip_reading_prefix_cache",
    "kv_transfer_params",
    "logits_processors",
}  # no range

NO_NUMBERS = (math.nan, math.inf, -math.inf, "1", None, True)
PENALTY = ((-2.0, 2.0, 0, 1.5), (-2.001, 2.001, *NO_NUMBERS), "a number in [-2, 2]")
LOGPROBS = ((None, -1, 0, 5, 10**6), (-2, 1.0, "all", True), "an integer >= -1 (-1 means the whole vocabulary)")
IDS = "a list of token ids >= 0"

# field -> (accepted, refused, what the message says is allowed)
BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "n": ((1, 2, MAX_N), (0, -1, MAX_N + 1, 1.0, "2", None, True), "an integer in [1, 16384]"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ((0.01, 1, 100), (0, -0.1, 1e-300, 1e300, 101, *NO_NUMBERS), "a number in [0.01, 100]"),
    "temperature": ((0, 0.0, 1e-9, 2, 2.0), (-1e-9, 2.0001, *NO_NUMBERS), "a number in [0, 2]"),
    "top_p": ((1e-9, 0.5, 1), (0, -0.1, 1.0001, *NO_NUMBERS), "a number in (0, 1]"),
    "top_k": ((-1, 0, 1, 10**6), (-2, 1.5, "1", None, True), "an integer >= -1 (0 and -1 mean off)"),
    "min_p": ((0, 0.5, 1), (-0.001, 1.0001, *NO_NUMBERS), "a number in [0, 1]"),
    "seed": ((None, -1, 0, 2**64 - 1), (-2, 2**64, 1.0, "7", True), "an integer in [0, 2^64), or -1 or None"),
    "stop": ((None, "x", [], ["x", "yz"]), ([""], ["x", 3]), "a non-empty string or a list of non-empty strings"),
    "stop_token_ids": ((None, [], [0, 7]), ([-1], [1.0], ["a"], [True]), IDS),
    "max_tokens": ((None, 0, 1, 10**9), (-1, 1.5, "1", True), "an integer >= 0, or None for the rest of the context"),
    "min_tokens": ((0, 1, 10**9), (-1, 1.5, None, True), "an integer >= 0"),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "logprob_token_ids": ((None, [], [0, 5], list(range(MAX_LOGPROB_IDS))), ([-1], [0.5]), IDS),
    "stream_interval": ((None, 1, 100), (0, -1, 1.5, True), "an integer >= 1"),
    "kv_chunks": (
        (None, [], [[0, 3], [3, 9]]),
        (3, [[1]], [[3, 3]], [[0, 4], [3, 9]], [[True, 3]], "ab"),
        "a list of pairs [first token, end] in ascending order",
    ),
    "blend_ratio": ((None, 0, 0.15, 1), (-0.1, 1.5, "1", True), "a number in [0, 1]"),
    "speculative_tokens": ((None, 0, 3), (-1, 1.5, "1", True), "an integer >= 0 (0 means no speculation)"),
    "logit_bias": (
        (None, {}, {0: 1.5, 7: -1000}),
        ({-1: 0.0}, {"a": 1.0}, {1: math.nan}, {1: "x"}, {True: 1.0}),
        "a map from token ids to finite numbers (clamped to [-100, 100])",
    ),
    "shown_special_ids": ((None, [], [7]), ([-1], ["x"]), IDS),
    "allowed_token_ids": ((None, [3], [0, 1]), ([-3], ["x"]), IDS),
    "bad_words": ((None, [], ["no"]), ([""], ["ok", 5]), "a list of non-empty strings"),
    "structured_outputs": (
        (None, StructuredOutputsParams(regex="a")),
        ({"regex": "a"}, "a", True),
        "a StructuredOutputsParams, or None",
    ),
}


def cases(which: int) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={str(value)[:20]}")
        for name, bounds in BOUNDS.items()
        for value in bounds[which]
    ]


def test_every_field_has_its_default_and_a_bound_or_is_a_choice() -> None:
    assert {f: getattr(SamplingParams(), f) for f in SamplingParams.__struct_fields__} == DEFAULTS
    assert BOUNDS.keys() | UNBOUNDED == DEFAULTS.keys() and not BOUNDS.keys() & UNBOUNDED


@pytest.mark.parametrize(("name", "value"), cases(0))
def test_accepted(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == value


@pytest.mark.parametrize(("name", "value"), cases(1))
def test_refused_with_the_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert re.match(rf"{name}(=| at )", str(error.value)) and f"{name} must be {BOUNDS[name][2]}" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", r"min_tokens must be at most max_tokens \(4\)"),
        ({"stop": "x", "detokenize": False}, "stop", "set detokenize=True, or use stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "non-empty: nothing could be sampled"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "129 ids.*at most 128 ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs", r"the number of logprob_token_ids \(2\)"),
    ],
)
def test_refused_together(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as error:
        SamplingParams(**fields)
    assert error.value.param == param


def test_accepted_together() -> None:
    SamplingParams(n=2, temperature=0.0)
    SamplingParams(min_tokens=4, max_tokens=4)
    SamplingParams(logprob_token_ids=[1, 2], logprobs=2)
    SamplingParams(stop=[], detokenize=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", "SamplingParams has no field 'foo': there are n, presence_penalty, "),
        ("temprature", "SamplingParams has no field 'temprature': did you mean 'temperature'?"),
        ("top-p", "SamplingParams has no field 'top-p': did you mean 'top_p'?"),
        ("best_of", "SamplingParams: best_of is not implemented: ask for n and choose by cumulative_logprob."),
        ("guided_jsn", "SamplingParams has no field 'guided_jsn', and guided_json is not implemented: use "),
    ],
)
def test_unknown_fields_are_refused_by_name_with_what_was_meant(name: str, message: str) -> None:
    for make in (SamplingParams, SamplingParams().clone):
        with pytest.raises(InvalidParameter) as error:
            make(**{"temperature": 0.5, name: 2})
        assert error.value.param == name and str(error.value).startswith(message)


def test_fields_that_are_not_implemented_say_so() -> None:
    assert not REFUSED.keys() & DEFAULTS.keys(), "a field that exists is not refused"
    assert REFUSED.keys() >= {
        "best_of",
        "extra_args",
        "flat_logprobs",
        "guided_json",
        "guided_regex",
        "repetition_detection",
        "routed_experts_prompt_start",
        "structural_tag",
        "thinking_token_budget",
        "use_beam_search",
    }
    for name, refused in REFUSED.items():
        with pytest.raises(InvalidParameter, match=f"^SamplingParams: {name} is not implemented: ") as error:
            SamplingParams(**{name: 3})
        assert refused.reason in str(error.value) and error.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("best_of", 1, True),
        ("flat_logprobs", False, 0),
        ("skip_clone", False, True),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 1.5),
        ("early_stopping", False, "never"),
        ("extra_args", {}, {"a": 1}),
        *((name, None, 3) for name in REFUSED),
    ],
)
def test_absent_fields_that_ask_for_nothing_are_taken(name: str, value: Any, other: Any) -> None:
    for make in (SamplingParams, SamplingParams().clone):
        assert make(**{name: value, "top_k": 4}) == SamplingParams(top_k=4)
        with pytest.raises(InvalidParameter, match=f"{name} is not implemented"):
            make(**{name: other})
    with pytest.raises(InvalidParameter, match="structural_tag is not implemented: write the output's structure"):
        StructuredOutputsParams(structural_tag="{}")  # type: ignore[call-arg]
    assert StructuredOutputsParams(regex="a", structural_tag=None).given == ["regex"]  # type: ignore[call-arg]


def test_a_name_is_refused_before_its_neighbours_are_looked_at() -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(temperature=9.0, foo=1)  # type: ignore[call-arg]
    assert error.value.param == "foo"
    assert SamplingParams.__struct_config__.forbid_unknown_fields  # a decoder refuses them too


def test_misspelt_fields_of_a_beam_search() -> None:
    for name, meant in (("beam_widht", "beam_width"), ("length_penalti", "length_penalty")):
        with pytest.raises(InvalidParameter, match=f"BeamSearchParams has no field .*: did you mean '{meant}'"):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: 1})


def test_assigned_values_are_checked_on_request() -> None:
    params = SamplingParams()
    params.temperature = 3.0
    with pytest.raises(InvalidParameter, match=r"temperature=3.0 is out of range"):
        params.check()


def test_clone_replaces_and_checks_and_leaves_the_original() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3)
    changed = params.clone(temperature=0.7, max_tokens=9)
    assert (changed.temperature, changed.max_tokens, changed.stop, changed.seed) == (0.7, 9, ["a"], 3)
    assert (params.temperature, params.max_tokens) == (0.5, None)
    with pytest.raises(InvalidParameter):
        params.clone(top_p=0)
    assert params.clone() == params


def test_greedy_and_stop_strings() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert [SamplingParams(stop=s).stop_strings for s in (None, "ab", ["a", "b"])] == [[], ["ab"], ["a", "b"]]


def test_params_and_specs_cross_a_wire_unchanged() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={3: 1.0}, output_kind=OutputKind.DELTA)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    spec = SamplerSpec(seed=2**64 - 1, num_prompt=3, bad_words=((1, 2), (3,)), logit_bias=((1, 0.5),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SamplerSpec) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, r"beam_width must be an integer >= 1"),
        ({"beam_width": 2.0}, r"beam_width must be an integer >= 1"),
        ({"max_tokens": 0}, r"max_tokens must be an integer >= 1"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": 2.1}, "temperature must be 0"),
        ({"length_penalty": math.inf}, r"length_penalty must be a number in \[-10, 10\]"),
        ({"length_penalty": 5000.0}, r"length_penalty must be a number in \[-10, 10\]"),
        ({"length_penalty": -5000.0}, r"length_penalty must be a number in \[-10, 10\]"),
    ],
)
def test_beam_search_bounds(fields: dict[str, Any], message: str) -> None:
    BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(InvalidParameter, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("stop", [""]),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("bad_words", "abc"),
        ("output_kind", 9),
        ("ignore_eos", "no"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        SamplingParams(**{field: value})

"""Values that the validator takes and refuses; its messages name the field and its range."""

import json
from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter
from quire.entry.http.access import body_shape
from quire.entry.http.errors import HttpError
from quire.entry.http.openai import decode
from quire.entry.http.openai.decode import ELSEWHERE, IGNORED, REFUSED, RequestDecoder
from quire.entry.http.openai.schema import ChatRequest, CompletionRequest

COMPLETION = RequestDecoder(CompletionRequest)
CHAT = RequestDecoder(ChatRequest)
USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> tuple[CompletionRequest, list[str]]:
    return COMPLETION.decode(json.dumps({"prompt": "a", **fields}).encode())


@pytest.mark.parametrize(
    ("field", "bad", "words"),
    [
        ("n", 0, "[1, 128]"),
        ("n", 129, "[1, 128]"),
        ("n", True, "an integer"),
        ("n", "1", "an integer"),
        ("n", 1.5, "an integer"),
        ("max_tokens", -1, ">= 0"),
        ("temperature", 2.1, "[0, 2]"),
        ("temperature", "0", "a number"),
        ("top_p", 1.1, "[0, 1]"),
        ("frequency_penalty", -2.5, "[-2, 2]"),
        ("presence_penalty", 3, "[-2, 2]"),
        ("repetition_penalty", 0, "above 0"),
        ("min_p", -0.1, "[0, 1]"),
        ("top_k", -2, ">= -1"),
        ("stop", 5, "a string or a list"),
        ("stop", ["a"] * 65, "at most 64"),
        ("logit_bias", {"5": 101}, "[-100, 100]"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logprobs", -2, ">= -1"),
        ("stream", 1, "true or false"),
        ("stream_options", True, "an object"),
        ("prompt", 5, "a string or a list"),
        ("prompt", [[1, "a"]], "an integer"),
        ("truncation_side", "top", "left, right"),
        ("cache_salt", "", "1 to 256"),
        ("cache_salt", "s" * 257, "1 to 256"),
        ("priority", 2**31, "an integer in"),
        ("stop_token_ids", [-1], ">= 0"),
        ("kv_chunks", 3, "a list of at most 128 entries (each a list of 2 entries (each an integer >= 0)), not an int"),
        ("kv_chunks", [3, 9], "kv_chunks[0] must be a list of 2 entries (each an integer >= 0), not an integer"),
        ("kv_chunks", [[1, 2], [3]], "kv_chunks[1] must be a list of 2 entries (each an integer >= 0)"),
        ("kv_chunks", [{"start": 1}], "kv_chunks[0] must be a list of 2 entries (each an integer >= 0), not an object"),
        ("kv_chunks", [[3, "a"]], "kv_chunks[0][1] must be an integer >= 0, not a string"),
        ("kv_chunks", [[-1, 4]], "kv_chunks[0][0] must be an integer >= 0"),
        ("blend_ratio", "0.5", "a number in [0, 1], not a string"),
        ("blend_ratio", 1.5, "a number in [0, 1]"),
    ],
)
def test_bad_values_name_field_and_range(field: str, bad: Any, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        completion(**{field: bad})
    assert caught.value.param == field
    assert field in str(caught.value) and words in str(caught.value)


def test_integers_are_numbers_and_null_is_not_given() -> None:
    request, unknown = completion(temperature=1, top_p=None, stop=None, n=None, logit_bias={"7": 2}, tools=None)
    assert (request.temperature, request.top_p, request.n) == (1.0, None, None)
    assert request.logit_bias == {7: 2.0}
    assert unknown == []


@pytest.mark.parametrize("text", [r"\ud800", r"a \uDBFF b", r"\ud83d\u0041", r"\udc00", r"\\\ud800"])
def test_half_a_character_is_called_that(text: str) -> None:
    with pytest.raises(HttpError, match="half of a surrogate pair; send whole characters") as caught:
        COMPLETION.decode(b'{"model": "m", "prompt": "%b"}' % text.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("prompt", [rb'"\ud83d\ude00', rb'"\\ud800', rb'"\u12"'])
def test_other_mistakes_of_json_keep_their_words(prompt: bytes) -> None:
    with pytest.raises(HttpError, match="not valid JSON") as caught:
        COMPLETION.decode(b'{"model": "m", "prompt": %b' % prompt)
    assert "surrogate" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {*CompletionRequest.__struct_fields__}))
def test_what_is_not_implemented_is_refused_and_its_harmless_values_are_not(name: str) -> None:
    with pytest.raises(HttpError) as caught:
        completion(**{name: {"anything": "else"}})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_parameter")
    assert (
        "is not read: send " if REFUSED[name].reason.startswith(("send ", ELSEWHERE)) else "not implemented yet"
    ) in str(caught.value)
    for value in (None, *REFUSED[name].harmless):
        assert completion(**{name: value})[1] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"guided_json": {"type": "object"}},
        {"best_of": 2},
        {"best_of": True},
        {"use_beam_search": True},
        {"modalities": ["text", "audio"]},
        {"chat_template": "{{ messages }}"},
    ],
)
def test_refused_values_that_clients_really_send(fields: dict[str, Any]) -> None:
    with pytest.raises(HttpError):
        completion(**fields)


@pytest.mark.parametrize("names", [("best_of", "guided_json"), ("guided_json", "best_of")])
def test_of_several_refused_fields_the_first_that_was_sent_is_named(names: tuple[str, str]) -> None:
    with pytest.raises(HttpError) as caught:
        completion(**dict.fromkeys(names, 2))
    assert caught.value.param == names[0]


def test_ignored_fields_are_silent_and_unknown_ones_are_named() -> None:
    request, unknown = completion(**dict.fromkeys(IGNORED, 1), foo=1, bar=[1])
    assert unknown == ["'foo'", "'bar'"]


def test_a_misspelt_field_is_told_with_the_one_that_was_meant() -> None:
    _, unknown = completion(max_token=5, temprature=0.5, Top_p=1, stopp="a", colour=1)
    assert unknown == [
        "'max_token' (did you mean max_tokens?)",
        "'temprature' (did you mean temperature?)",
        "'Top_p' (did you mean top_p?)",
        "'stopp' (did you mean stop?)",
        "'colour'",
    ]


def test_names_of_unknown_fields_cannot_break_a_header() -> None:
    _, unknown = completion(**{"a\r\nx: y\u20ac": 1, "b" * 1000: 2})
    assert all(name.isascii() and name.isprintable() and len(name) < 80 for name in unknown)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"null",
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": ' + b"[" * 20_000,
        b"{}",
    ],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises((HttpError, InvalidParameter)) as caught:
        COMPLETION.decode(body)
    assert not isinstance(caught.value, HttpError) or caught.value.status == 400


@pytest.mark.parametrize("depth", [127, 500, 990])
@pytest.mark.parametrize("opening, closing", ["[]", ('{"a":', "}")])
def test_depth_is_bounded_before_anybody_walks_it(depth: int, opening: str, closing: str) -> None:
    """Brackets within texts do not count, wherever a text seems to end."""
    for at, fits in ((126, True), (depth, False)):
        inner = opening * at + '"\\\\"' + closing * at
        body = ('{"prompt": "' + r"[{\"[[" * 200 + '", "x": [{"s": "}]\\\\"}, ' + inner + "]}").encode()
        if fits:
            COMPLETION.decode(body)
            continue
        with pytest.raises(HttpError, match="nested too deeply: at most 128"):
            COMPLETION.decode(body)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ('{"prompt": "a"}', 2),
        ('{"prompt": "[{:"}', 2),
        (r'{"prompt": "a\\\"[{:\\", "x": [[], {"k": 1}]}', 7),
    ],
)
def test_parts_are_counted_before_they_are_decoded(body: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 8 MB with a million fields took half a second of the event loop. Marks inside texts do not count."""
    for most in (parts, parts - 1):
        monkeypatch.setattr(body_shape, "MAX_PARTS", most)
        monkeypatch.setattr(decode, "MAX_PARTS", most)
        if most == parts:
            COMPLETION.decode(body.encode())
    with pytest.raises(HttpError, match=f"more than {parts - 1} fields, lists and objects"):
        COMPLETION.decode(body.encode())


def test_many_lists_side_by_side_are_not_deep() -> None:
    COMPLETION.decode(b'{"prompt": "a", "x": [' + b"[{}]," * 1000 + b"[]]}")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format has an unknown field 'schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "json_schema has an unknown",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
            "tool_choice has an unknown field 'x'",
        ),
        ({"reasoning_effort": "banana"}, "reasoning_effort must be one of"),
    ],
)
def test_fields_of_fields_are_known_or_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        CHAT.decode(json.dumps({"messages": USER} | fields).encode())
    assert words in str(caught.value) and caught.value.param == next(iter(fields))
    named = {"name": "n", "schema": {}, "strict": True, "description": "d"}
    structured = {"type": "json_schema", "json_schema": named}
    CHAT.decode(json.dumps({"messages": USER, "response_format": structured}).encode())


@pytest.mark.parametrize("given", ["-1e400", '{"5": 1e400}', '{"type": 1e400}', '{"json": {"a": 1e400}, "regex": 1}'])
@pytest.mark.parametrize("name", ["logit_bias", "response_format", "structured_outputs"])
def test_numbers_beyond_every_float_are_refused_by_the_field(name: str, given: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        COMPLETION.decode(f'{{"prompt": "a", "{name}": {given}}}'.encode())
    assert caught.value.param == name


def test_missing_fields_are_named() -> None:
    with pytest.raises(InvalidParameter, match="prompt is missing") as caught:
        COMPLETION.decode(b"{}")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidParameter, match=r"messages\[0\].role is missing: it must be a string") as caught:
        CHAT.decode(b'{"messages": [{"content": "hi"}]}')
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": 1, "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": USER, "top_logprobs": -2},
        {"messages": USER, "logprobs": 5},
        {"messages": USER, "chat_template_kwargs": []},
    ],
)
def test_bad_chats(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        CHAT.decode(json.dumps(fields).encode())


def test_an_integer_may_be_written_as_a_fraction() -> None:
    body = {"messages": USER, "max_tokens": 2.0, "seed": -0.0, "top_k": 3.0, "temperature": 1.0, "extra": 1.0}
    request, unknown = CHAT.decode(json.dumps(body).encode())
    assert (request.max_tokens, request.seed, request.top_k, unknown) == (2, 0, 3, ["'extra'"])
    for wrong in ({"max_tokens": 2.5}, {"seed": 1e300}, {"top_k": "3"}, {"n": 0.0}, {"n": 129.0}):
        with pytest.raises(InvalidParameter) as caught:
            CHAT.decode(json.dumps({"messages": USER, "max_tokens": 2.0} | wrong).encode())
        assert caught.value.param in wrong


def test_a_history_of_any_shape_is_taken() -> None:
    history = [
        {"role": "developer", "content": "be brief", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "extra": {"a": 1}},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "refusal": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "four", "reasoning": "2+2"},
    ]
    request, unknown = CHAT.decode(json.dumps({"messages": history}).encode())
    assert len(request.messages) == 5 and unknown == ["'messages[].extra'"]

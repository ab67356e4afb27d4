"""Grammars of tool calls: llguidance takes them, and what it lets a model write are calls that obey their schemas."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from quire.text.tools import OutputParser, OutputStyles, tool_grammar
from quire.text.turn import CallArguments, CallBegins, Thought, Words

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
FORMATS = {row.names[0]: row for row in TOOL_FORMATS}
THINK = REASONING_FORMATS[0]
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object", "$defs": {"Point": POINT}, "required": ["city", "where"], "additionalProperties": False,
        "properties": {
            "days": {"type": "integer", "minimum": 1}, "city": {"type": "string", "minLength": 2, "maxLength": 9},
            "unit": {"enum": ["c", "f"]}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/Point"}, "tags": {"type": ["array", "string"], "items": {"type": "boolean"}}}},
    "now": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"const": 5}},
            "additionalProperties": False},
    "mcp.any-name/of:it": {"type": "object", "properties": {"a-b": {"type": "integer"}, "class": {"type": "null"}},
                 "required": ["a-b"], "additionalProperties": False},
}


def tools(*names: str, strict: bool = True) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], "strict": strict}}
            for name in names or SCHEMAS]


class Adapter:
    """A tokenizer as llguidance wants it. Only the special tokens that are no tags are special to it."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, [0, 1, 2, 3]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special_tokens=False)


@pytest.fixture(scope="module")
def vocabulary(shared: Path) -> Any:
    adapter = Adapter(Tokenizer.load(shared / "models" / "quire-tiny"))
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(adapter))


def walk(vocabulary: Any, grammar: str, begins: list[str], ends: list[str], rng: Random) -> str:
    """A random text that the grammar accepts: tokens at random, and what begins a call; later mostly what ends."""
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    spelled = [vocabulary.tokenize_str(text) for text in (*begins, *ends)]
    ids: list[int] = []
    for step in range(1000):
        mask = matcher.compute_logit_bias()
        if mask[vocabulary.eos_token] and (sum(map(bool, mask)) == 1 or rng.random() < 0.2 or step > 40):
            return str(vocabulary.decode_str(ids))
        texts = spelled[len(begins) :] if step > 40 else spelled
        known = [tokens for tokens in texts if matcher.validate_tokens(tokens) == len(tokens)]
        if known and rng.random() < (0.5 if step <= 40 else 0.95):
            chosen = rng.choice(known)
        else:
            allowed = [token for token, bias in enumerate(mask) if bias and token > 3]
            chosen = [rng.choice(allowed)]
        assert matcher.consume_tokens(chosen), matcher.get_error()
        ids += chosen
    raise AssertionError(f"no end: {vocabulary.decode_str(ids)!r}")


@pytest.mark.parametrize("choice", ["required", "now", "auto", "mcp.any-name/of:it"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_it_allows_are_calls_that_obey_their_schemas(vocabulary: Any, name: str, choice: str) -> None:
    form = FORMATS[name]
    styles, thinking = OutputStyles(form, THINK, ""), choice == "now"
    options: dict[str, Any] = {"parallel": choice != "mcp.any-name/of:it", "thinking": thinking}
    grammar = tool_grammar(styles, tools(), choice, **options)
    ends = ["</think>", '"', "}", "]", ")", ", ", "0", *form.value_ends[:1], form.printed[5]]
    opening, before, between, *_ = form.printed
    begins = [opening + before + (json.dumps(tool) if before.endswith(": ") else tool) + between for tool in SCHEMAS]
    total = 0
    for seed in range(5):
        text = walk(vocabulary, grammar, begins, [end for end in ends if end], Random(seed))
        parser = OutputParser(styles, tools=tools(), **options)
        events = parser.feed(text) + parser.finish()
        calls = [[event.name, ""] for event in events if isinstance(event, CallBegins)]
        for event in events:
            if isinstance(event, CallArguments):
                calls[event.index][1] += event.text
            assert choice == "auto" or not isinstance(event, Words), text
        for tool, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool])
        if choice in SCHEMAS:
            assert [tool for tool, _ in calls] == [choice]
        assert calls or choice == "auto", text
        assert not thinking or isinstance(events[0], Thought | CallBegins)
        total += len(calls)
    assert total >= (1 if choice == "auto" else 5)


def matches(vocabulary: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and (
        matcher.is_accepting()))


def test_choices(vocabulary: Any) -> None:
    styles = OutputStyles(FORMATS["hermes"], THINK, "")

    def grammar(choice: str, names: tuple[str, ...] = ("now",), parallel: bool = False, **options: Any) -> str:
        return tool_grammar(styles, tools(*names), choice, parallel=parallel, **options)

    one = '<tool_call>\n{"name": "now", "arguments": {"a": true}}\n</tool_call>'
    for choice in ("required", "now", "auto"):
        assert matches(vocabulary, grammar(choice), one), choice
        assert matches(vocabulary, grammar(choice), f"<think>so</think>\n\n{one}"), choice
        assert matches(vocabulary, grammar(choice, thinking=True), f"so</think>{one}"), choice
        assert not matches(vocabulary, grammar(choice, thinking=True), one), choice
        assert matches(vocabulary, grammar(choice, parallel=True), f"{one}\n{one}") == (choice != "now")
        assert not matches(vocabulary, grammar(choice), f"{one}\n{one}"), choice
        assert not matches(vocabulary, grammar(choice), one.replace("true", '"x"')), choice
        assert not matches(vocabulary, grammar(choice), one.replace("now", "get_weather")), choice
        assert matches(vocabulary, grammar(choice), "Hello.") == (choice == "auto")
        assert matches(vocabulary, grammar(choice), f"Hello. {one}") == (choice == "auto")
    with pytest.raises(InvalidParameter, match="'other' names none of the tools"):
        grammar("other")


def test_schemas_that_llguidance_does_not_know(vocabulary: Any) -> None:
    unknown = {"type": "object", "properties": {"a": {"type": "integer", "contentMediaType": "x", "not": {"const": 1}}}}
    for name, form in FORMATS.items():
        for strict in (True, False):
            tool = {"type": "function", "function": {"name": "f", "parameters": unknown, "strict": strict}}
            text = tool_grammar(OutputStyles(form, None, ""), [tool], "required", parallel=True)
            problem = llguidance.LLMatcher.validate_grammar(text, vocabulary)
            assert bool(problem) == strict, (name, problem)


@pytest.mark.parametrize("keyword", ["pattern", "format"])
def test_what_a_bare_string_cannot_be_held_to_is_refused(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", keyword: "date"}}}
    for name, form in FORMATS.items():
        for strict in (True, False):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
            if strict and form.key:
                with pytest.raises(InvalidParameter, match="'a': this model writes strings bare"):
                    tool_grammar(OutputStyles(form, None, ""), [tool], "f", parallel=True)
            else:
                assert tool_grammar(OutputStyles(form, None, ""), [tool], "f", parallel=True), name


def test_a_tool_without_parameters_takes_none(vocabulary: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    grammar = tool_grammar(OutputStyles(FORMATS["llama3_json"], None, ""), [tool], "required", parallel=True)
    assert matches(vocabulary, grammar, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}')
    assert not matches(vocabulary, grammar, '{"name": "f", "parameters": {"a": 1}}')

"""Grammars of tool calls: llguidance takes them, and what it lets a model write are calls that obey their schemas."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.answers.answer_events import CallArguments, CallBegins, Thought, Words
from quire.answers.grammar import LEFT_OUT, GrammarCompiler
from quire.answers.json_schema import Reading, holdable_in_lark
from quire.answers.output_parser import OutputParser
from quire.answers.tool_grammar import tool_grammar
from quire.config.bundled import bundled_model
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import StructuredOutputsParams
from quire.text.output_styles import OutputStyles
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
FORMATS = {row.names[0]: row for row in TOOL_FORMATS}
THINK = REASONING_FORMATS[0]
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "$defs": {"Point": POINT},
        "required": ["city", "where"],
        "additionalProperties": False,
        "properties": {
            "days": {"type": "integer", "minimum": 1},
            "city": {"type": "string", "minLength": 2, "maxLength": 9},
            "unit": {"enum": ["c", "f"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/Point"},
            "tags": {"type": ["array", "string"], "items": {"type": "boolean"}},
        },
    },
    "now": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"const": 5}},
        "additionalProperties": False,
    },
    "mcp.any-name/of:it": {
        "type": "object",
        "properties": {"a-b": {"type": "integer"}, "class": {"type": "null"}},
        "required": ["a-b"],
        "additionalProperties": False,
    },
}


def tools(*names: str, strict: bool = True) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], "strict": strict}}
        for name in names or SCHEMAS
    ]


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
    fmt = FORMATS[name]
    styles, thinking = OutputStyles(fmt, THINK, ""), choice == "now"
    options: dict[str, Any] = {"parallel": choice != "mcp.any-name/of:it", "thinking": thinking}
    grammar = tool_grammar(styles, tools(), choice, **options)
    ends = ["</think>", '"', "}", "]", ")", ", ", "0", *fmt.value_ends[:1], fmt.printed[5]]
    opening, before, between, *_ = fmt.printed
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
    return bool(
        matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and (matcher.is_accepting())
    )


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
    for name, fmt in FORMATS.items():
        for strict in (True, False):
            tool = {"type": "function", "function": {"name": "f", "parameters": unknown, "strict": strict}}
            text = tool_grammar(OutputStyles(fmt, None, ""), [tool], "required", parallel=True)
            problem = llguidance.LLMatcher.validate_grammar(text, vocabulary)
            assert bool(problem) == strict, (name, problem)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[a-z/]{2,4}$"}, ["ab/c"], ["a", "aB", "abcde"]),
        ({"pattern": "b/"}, ["xb/x", "b/"], ["xb"]),
        ({"pattern": "^a|b$", "maxLength": 3}, ["a", "axx", "xb"], ["xax", "axxx"]),
        ({"pattern": "^$"}, [""], ["a"]),
        ({"pattern": "(?i)^ab$"}, ["aB"], ["b"]),
        ({"pattern": r"^[^/\]]\n\\$"}, ["a\n\\"], ["/\n\\"]),
        ({"pattern": r"^(x|y$)", "minLength": 1}, None, []),
        ({"pattern": "a(?=b)"}, None, []),
        ({"format": "date"}, ["2024-02-28"], ["2024-02-31", "24-1-1"]),
        ({"format": "date-time"}, ["2024-02-28T23:59:01Z", "2024-12-31t00:00:00.5+01:00"], ["2024-02-28"]),
        ({"format": "time"}, ["23:59:01Z"], ["24:00:00Z"]),
        ({"format": "duration"}, ["P1DT2H", "PT5M", "P3W"], ["P"]),
        ({"format": "email"}, ["a.b+c@d-e.org"], ["a@", "a b@c"]),
        ({"format": "hostname"}, ["a.b-c.org"], ["-a", "a..b"]),
        ({"format": "ipv4"}, ["192.168.0.255"], ["1.2.3.256"]),
        ({"format": "ipv6"}, ["fe80::1", "::"], ["fe80", "1::g"]),
        ({"format": "uuid4"}, ["0b9a2a1e-6b6b-4f6e-8f6e-0b9a2a1e6b6b"], ["0b9a2a1e-6b6b-1f6e-8f6e-0b9a2a1e6b6b"]),
        ({"format": "uuid"}, ["0b9a2a1e-6b6b-1f6e-0f6e-0b9a2a1e6b6b"], ["0b9a2a1e"]),
        ({"format": "uri"}, ["https://a.org:80/b?c=d#e", "mailto:a@b.c"], ["a b", "//a"]),
        ({"format": "path"}, ["any"], []),
        ({"not": {"const": "a"}}, None, []),
        ({"allOf": [{"maxLength": 1}]}, None, []),
    ],
    ids=str,
)
def test_a_bare_string_is_held_to_its_schema(
    vocabulary: Any, schema: dict[str, Any], good: list[str] | None, bad: list[str]
) -> None:
    """In tags, where there are no quotes. `good` None: it cannot be held; strict it is refused, and told if not."""
    for name, fmt in FORMATS.items():
        for strict in (True, False) if fmt.key else ():
            parameters = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
            grammar = tool_grammar(OutputStyles(fmt, None, ""), [tool], "f", parallel=False)
            opening, before, between, after, _, closing = fmt.printed
            texts = {
                text: "".join(
                    (
                        opening,
                        before,
                        "f",
                        between,
                        fmt.key,
                        "a",
                        fmt.key_ends[0],
                        fmt.value,
                        text,
                        fmt.value_ends[0],
                        "\n",
                        after,
                        closing,
                    )
                )
                for text in [*(good or ["b"]), *bad]
            }
            if good is None and strict:
                with pytest.raises(InvalidParameter, match=r"cannot be used: f\.parameters\.properties\.a: "):
                    holdable_in_lark(grammar)
                continue
            held = holdable_in_lark(grammar, reading := Reading())
            assert [text for text in good or ["b"] if not matches(vocabulary, held, texts[text])] == [], name
            assert [text for text in bad if matches(vocabulary, held, texts[text])] == [], name
            assert bool(reading.notes) == (good is None or schema == {"format": "path"}), reading.notes


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_what_is_asked_of_all_arguments_together_is_not_lost(name: str) -> None:
    """Arguments that are not a JSON object are refused with the path, or told; a root that only refers is followed."""
    a = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    for more, words in (
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"minProperties": 2}, "minProperties"),
        ({"not": {}}, "not"),
        ({"required": ["a", "b"]}, "required b"),
        ({"maxProperties": 0}, "max"),
    ):
        for strict in (True, False):
            tool = {"type": "function", "function": {"name": "f", "parameters": a | more, "strict": strict}}
            grammar = tool_grammar(OutputStyles(FORMATS[name], None, ""), [tool], "f", parallel=False)
            if strict:
                with pytest.raises(InvalidParameter, match=f"cannot be used: f.parameters: {words}"):
                    holdable_in_lark(grammar)
            else:
                holdable_in_lark(grammar, reading := Reading())
                assert [note.startswith(f"f.parameters: {words}") for note in reading.notes] == [True]
    for parameters in (a, {"$ref": "#/$defs/A", "$defs": {"A": a}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert "tail0_0" in tool_grammar(OutputStyles(FORMATS[name], None, ""), [tool], "f", parallel=False)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_arguments_one_by_one(vocabulary: Any, name: str) -> None:
    """Optional arguments may be left out; at least one is there if required; 500 of them are taken."""
    fmt = FORMATS[name]
    opening, before, between, after, _, closing = fmt.printed

    def call(*names: str) -> str:
        ends = (fmt.key_ends or "=")[0], "".join(fmt.value_ends[:1]) + "\n" * bool(fmt.key)
        each = ("" if fmt.key else ", ").join(f"{fmt.key}{key}{ends[0]}1{ends[1]}" for key in names)
        return "".join((opening, before, "f", between, each, after, closing))

    def grammar(count: int, **more: Any) -> str:
        properties = {f"p{at}": {"type": "integer"} for at in range(count)}
        tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties, **more}}}
        return tool_grammar(OutputStyles(fmt, None, ""), [tool], "f", parallel=False)

    for more, good, bad in (
        ({}, [(), ("p0",), ("p2",), ("p0", "p2"), ("p0", "p1", "p2")], [("p1", "p0"), ("p0", "p0"), ("p3",)]),
        ({"minProperties": 1}, [("p0",), ("p2",), ("p1", "p2")], [()]),
        ({"required": ["p0"]}, [("p0",), ("p0", "p2")], [(), ("p1",)]),
        ({"required": ["p0", "p1", "p2"]}, [("p0", "p1", "p2")], [("p0", "p2"), ()]),
    ):
        assert [names for names in good if not matches(vocabulary, grammar(3, **more), call(*names))] == [], more
        assert [names for names in bad if matches(vocabulary, grammar(3, **more), call(*names))] == [], more
    spec = StructuredOutputsParams(grammar=grammar(500)).spec()
    tokenizer = Tokenizer.load(bundled_model())
    matcher = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size).compile(spec).fork()
    assert matcher.try_consume_tokens(tokens := tokenizer.encode(call("p3", "p70", "p499"))) == len(tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_only_arguments_that_may_be_left_out_give_a_grammar_room(name: str) -> None:
    properties = {f"p{at}": {"type": "integer"} for at in range(9)}
    parameters = {"type": "object", "properties": properties, "required": ["p3"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = tool_grammar(OutputStyles(FORMATS[name], THINK, ""), [tool], "auto", parallel=True)
    in_lark = FORMATS[name].key or FORMATS[name].syntax
    assert len(LEFT_OUT.findall(text)) == (8 - bool(FORMATS[name].key) if in_lark else 0)  # the first has a way more
    assert not LEFT_OUT.findall("start: (word ' ' )? w? detail0? x1? tail? \nw: /a? /")


def test_a_tool_without_parameters_takes_none(vocabulary: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    grammar = tool_grammar(OutputStyles(FORMATS["llama3_json"], None, ""), [tool], "required", parallel=True)
    assert matches(vocabulary, grammar, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}')
    assert not matches(vocabulary, grammar, '{"name": "f", "parameters": {"a": 1}}')


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.key or fmt.syntax])
def test_an_argument_that_no_value_fits_is_not_given(name: str) -> None:
    """`false` as the schema of a property; where the property is required, that is told."""

    def grammar(**more: Any) -> str:
        parameters = {"type": "object", "properties": {"odd": False, "even": {"type": "integer"}}, **more}
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
        return tool_grammar(OutputStyles(FORMATS[name], None, ""), [tool], "f", parallel=False)

    assert "even" in grammar() and "odd" not in grammar()
    with pytest.raises(InvalidParameter, match="cannot be used: f.parameters: required odd"):
        holdable_in_lark(grammar(required=["odd"]))


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"enum": ["one", "three", 2]}, ["one", "three"]),
        ({"enum": ["one", "three"], "maxLength": 3}, ["one"]),
        ({"enum": ["one", "three"], "const": "three"}, ["three"]),
        ({"const": "one"}, ["one"]),
    ],
)
def test_words_of_a_bare_string_fit_its_other_keywords(schema: dict[str, Any], left: list[str]) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", **schema}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    grammar = tool_grammar(OutputStyles(FORMATS["glm45"], None, ""), [tool], "f", parallel=False)
    assert [word for word in ("one", "three", "2") if f'"{word}"' in grammar] == left

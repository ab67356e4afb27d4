"""Grammars become masks: every kind of structured output, ends of a text, grammars that were written to hurt."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.answers import grammar
from quire.answers.grammar import GrammarCompiler, error_of
from quire.config.bundled import bundled_model
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import MAX_BYTES, StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

from ...support.byte_tokenizer import ByteTokenizer

PADDING = 100  # ids of the model that its tokenizer has not
TOKENIZER = Tokenizer.load(bundled_model())
VOCAB = TOKENIZER.vocab_size + PADDING
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: TOKENIZER, VOCAB)


def compiled(compiler: GrammarCompiler, **structured: Any) -> Any:
    return compiler.compile(StructuredOutputsParams(**structured).spec())


def allowed(compiler: GrammarCompiler, matcher: Any, enders: tuple[int, ...] = (END,)) -> tuple[set[int], bool]:
    """The ids that may come next, and whether the text is over."""
    masks, over = compiler.masks([matcher], [enders])
    assert masks.shape == (1, -(-VOCAB // 32)) and masks.dtype == np.int32 and masks.flags["C_CONTIGUOUS"]
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), count=VOCAB, bitorder="little")).tolist()), bool(over)


def fits(compiler: GrammarCompiler, text: str, **structured: Any) -> bool:
    """True if the grammar allows the text, judged by the masks alone."""
    matcher = compiled(compiler, **structured).fork()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        ids, over = allowed(compiler, matcher)
        if over or token not in ids:
            return False
        assert matcher.consume_token(token)
    ids, over = allowed(compiler, matcher)
    return over or END in ids


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": PERSON},
        ['{"name": "Ann"}', '{"name":"Zoë 😀\\n", "age" : 3}'],
        ['{"age": 3}', '{"name": "Ann", "age": -3}', '{"name": "Ann", "x": 1}', '{"name": "Ann"', ' {"name": "Ann"}'],
    ),
    ({"json": json.dumps(PERSON)}, ['{"name": "Ann"}'], ['{"age": 3}']),
    ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"A b","age":3}'], ['{"name": "Ann"}']),
    ({"json": True}, ["null", "[1, 2.5e3]", '"x"', "{}"], ["nul", "[1,", "x"]),
    ({"json": True, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
    ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '{"a"}']),
    ({"regex": "[0-9]{3}-[0-9]{4}"}, ["123-4567"], ["123-456", "1234567", "123-45678"]),
    ({"regex": "^(yes|no)$"}, ["yes", "no"], ["yesno", ""]),
    ({"regex": "a*"}, ["", "aaa"], ["ab"]),
    (
        {"choice": ["red", "dark red", 'a "quoted"\n\\ b', "ü😀\x7f", "red"]},
        ["red", "dark red", 'a "quoted"\n\\ b', "ü😀\x7f"],
        ["dark", "reddark red", "", "blue"],
    ),
    ({"choice": ["no", "nope"]}, ["no", "nope"], ["nop"]),
    ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", "()"]),
    *(
        ({"grammar": head + ' "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", "()"])
        for head in ("?start:", "!start:", "!?start :", "// ::=\n\n  ?start:", 'start[capture="x"]:')
    ),
    ({"grammar": 'root ::= "(" root ")" | [xy]'}, ["y", "((x))"], ["((x)", "z"]),
    ({"grammar": 'start: item ("," item)*\nitem: %json {"type": "integer"}'}, ["1", "1,22"], ["1,", "a"]),
]


@pytest.mark.parametrize(("structured", "good", "bad"), CASES, ids=lambda case: str(case)[:40])
def test_a_grammar_takes_its_texts_and_no_others(
    compiler: GrammarCompiler, structured: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not fits(compiler, text, **structured)] == []
    assert [text for text in bad if fits(compiler, text, **structured)] == []


@pytest.mark.parametrize(
    ("text", "structured"),
    [
        ("<|im_end|>", {"choice": ["<|im_end|>"]}),
        ("a<|im_end|>b", {"regex": r"a<\|im_end\|>b"}),
        ("<|im_start|>user<|im_end|>", {"choice": ["<|im_start|>user<|im_end|>", "x"]}),
        ('"<|im_end|>"', {"json": {"const": "<|im_end|>"}}),
        ("<|endoftext|>.", {"grammar": 'start: "<|endoftext|>."'}),
    ],
)
def test_the_text_of_a_special_token_is_text(compiler: GrammarCompiler, text: str, structured: dict[str, Any]) -> None:
    matcher = compiled(compiler, **structured).fork()
    written = b""
    while not (step := allowed(compiler, matcher))[1]:
        ids = {i for i in step[0] if text.encode().startswith(written + TOKENIZER.token_bytes(i))}
        assert ids and not step[0] & TOKENIZER.all_special_ids, (written, step)
        token = max(ids, key=lambda i: len(TOKENIZER.token_bytes(i)))
        assert matcher.consume_token(token)
        written += TOKENIZER.token_bytes(token)
    assert written.decode() == text


def test_what_a_mask_allows_beside_the_grammar(compiler: GrammarCompiler) -> None:
    """The enders of the request where the text may end, only there; no special token or id beyond the vocabulary."""
    grammar = compiled(compiler, regex="a{2,}")
    matcher = grammar.fork()
    ids, over = allowed(compiler, matcher, (END, 300, VOCAB - 1))
    assert not over and not ids & {*TOKENIZER.all_special_ids, 300, *range(TOKENIZER.vocab_size, VOCAB)}
    assert {TOKENIZER.decode([i]).strip("a") for i in ids} == {""}
    for token in TOKENIZER.encode("aaa"):
        assert matcher.consume_token(token)
    ids, over = allowed(compiler, matcher, (END, 300, VOCAB - 1))
    assert not over and {END, 300, VOCAB - 1} < ids and TOKENIZER.token_id("<|endoftext|>") not in ids
    ids, over = allowed(compiler, matcher, ())  # the end of sequence is ignored: it may go on, not end
    assert not over and ids and not ids & TOKENIZER.all_special_ids


def test_json_of_any_style_fits_and_white_space_without_end_does_not(compiler: GrammarCompiler) -> None:
    value = {"a": [1, {"b": 2}], "c": {}}
    for style in ({}, {"separators": (",", ":")}, {"indent": 4}, {"indent": "\t"}, {"indent": 0}):
        for structured in ({"json_object": True}, {"json": {"type": "object", "x-guidance": {"item_separator": ","}}}):
            assert fits(compiler, json.dumps(value, **style), **structured), (style, structured)
    assert fits(compiler, json.dumps(value, indent=1).replace("\n", "\r\n"), json_object=True)
    for blank in ("  ", "\n\n", "\n" + " " * 61, "\t"):
        assert not fits(compiler, '{"a":' + blank + "1}", json_object=True), blank


def test_a_text_that_nothing_can_follow_is_over(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, choice=["red"]).fork()
    for token in TOKENIZER.encode("red"):
        assert allowed(compiler, matcher)[1] is False
        matcher.consume_token(token)
    assert matcher.is_stopped() and allowed(compiler, matcher) == (set(range(VOCAB)), True)
    assert allowed(compiler, compiled(compiler, choice=[""]).fork())[1]


def test_rows_are_apart(compiler: GrammarCompiler) -> None:
    """Forks of one grammar at different places, another grammar, and a row that is free."""
    mixed, word = compiled(compiler, regex="[a-c][0-9]{3}"), compiled(compiler, choice=["red"])
    first, second = mixed.fork(), mixed.fork()
    second.consume_token(TOKENIZER.token_id("a"))
    masks, over = compiler.masks([first, None, second, word.fork()], [(), (), (), ()])
    assert over == [] and (masks[1] == -1).all()
    for row, matcher in ((0, mixed.fork()), (2, second), (3, word.fork())):
        assert (masks[row] == compiler.masks([matcher], [()])[0][0]).all()
    assert (masks[0] != masks[2]).any() and (masks[0] != masks[3]).any()


def test_outputs_of_one_grammar_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their matchers are dealt from several copies, where these are soon made; masks are those of one."""
    import llguidance

    made: list[Any] = []

    class Counting:
        """A matcher that remembers what was copied of it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.matcher, self.copies = LLMatcher(*args, **options), 0
            made.append(self)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def deep_copy(self) -> Any:
            self.copies += 1
            return self.matcher.deep_copy()

        grammar_from_regex = llguidance.LLMatcher.grammar_from_regex

    LLMatcher = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    for threads, seconds, copies in ((1, 10, [5]), (3, 10, [2, 2, 1]), (99, 10, [1] * 5 + [0] * 3), (3, 0, [5])):
        monkeypatch.setattr(grammar, "COPIES_SECONDS", seconds)
        made.clear()
        several = GrammarCompiler(lambda: TOKENIZER, VOCAB, threads=threads)
        structured = compiled(several, regex="[a-c][0-9]{3}")
        masks, _ = several.masks([structured.fork() for _ in range(5)], [()] * 5)
        assert [one.copies for one in made] == copies and (masks == masks[0]).all() and masks.any()


def test_a_failed_matcher_is_over_and_says_why(compiler: GrammarCompiler) -> None:
    good, bad = (compiled(compiler, regex="[0-9]{4}").fork() for _ in range(2))
    assert not bad.consume_token(TOKENIZER.token_id("a"))
    masks, over = compiler.masks([good, bad], [(), ()])
    assert over == [1] and error_of(bad) and not error_of(good) and not (masks[0] == -1).all()


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"json": '{"type": "object"'}, "json is not valid JSON"),
        ({"json": "[1]"}, "schema must be an object or boolean"),
        ({"json": False}, "json is false, which no text matches"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
        ({"json": {"x-guidance": 5}}, "invalid type: integer"),
        ({"json": {"not": {}}}, "not is not implemented: leave it out"),
        ({"json": {"$ref": "#/nowhere"}}, "$ref: '#/nowhere' is not defined in the schema"),
        (
            {"json": {"$ref": "https://example.com/schema.json"}},
            "$ref: 'https://example.com/schema.json' is not defined",
        ),
        ({"json": {"$ref": "file:///etc/passwd"}}, "$ref: 'file:///etc/passwd' is not defined in the schema"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"choice": []}, "choice is empty"),
        ({"grammar": "begin: 'a'"}, "no rule named start"),
        ({"grammar": 'root ::= "a" ('}, "no rule named start"),
        ({"grammar": "start: undefined"}, "undefined"),
        ({"grammar": 'start.1: "a"'}, "priority not supported"),
        ({"grammar": "root ::= root"}, "no text can match it"),
        ({"grammar": "start: a\na: b\nb: a"}, "no text can match it"),
    ],
)
def test_what_cannot_be_compiled_says_what_is_wrong(
    compiler: GrammarCompiler, structured: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(words)) as refusal:
        compiled(compiler, **structured)
    assert refusal.value.param == "structured_outputs" and len(str(refusal.value)) < 1000


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def doubling(rule: str, count: int) -> str:
    rules = [f"{rule}{i}: {rule}{i + 1} {rule}{i + 1}" for i in range(count)]
    return "\n".join([f"start: {rule}0", *rules, f'{rule}{count}: "x" | "y"'])


NODE = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}}
HOSTILE: dict[str, tuple[dict[str, Any], bool]] = {  # and whether it has to work
    "enum of 10,000": ({"json": {"enum": [f"value-{i}" for i in range(10_000)]}}, True),
    "choice of 10,000": ({"choice": [f"choice number {i}" for i in range(10_000)]}, True),
    "enum of 50,000": ({"json": {"enum": [f"v{i}" for i in range(50_000)]}}, False),
    "exponential automaton": ({"regex": "(a|b)*a(a|b){20}"}, True),
    "nested stars": ({"regex": "((a+)+)+b"}, True),
    "nested counts": ({"regex": "((((a{0,99}){0,99}){0,99}){0,99}){0,99}"}, False),
    "long counts": ({"regex": "([a-z]{1,1000}[0-9]{1,1000}){1,1000}"}, True),
    "any letters": ({"regex": r"(\p{L}|\p{N}){5,500}"}, True),
    "complements": ({"grammar": "start: A\nA: ~/(a|b)*a(a|b){12}/ & ~/(b|c)*b(b|c){12}/"}, True),
    "nested 50": ({"json": nested(50)}, True),
    "nested 300": ({"json": nested(300)}, False),
    "nested arrays": ({"json": '{"type":"array","items":' * 20_000 + "{}" + "}" * 20_000}, False),
    "recursive": ({"json": NODE}, True),
    "its own definition": ({"json": {"$ref": "#"}}, False),
    "a circle of references": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        False,
    ),
    "left recursion": ({"grammar": 'start: start "a" | "b"'}, True),
    "root is root": ({"grammar": "root ::= root"}, False),
    "ambiguous": ({"grammar": 'start: s\ns: s s | s s s | "a"'}, False),
    "ambiguous and empty": ({"grammar": 'start: e\ne: e e | e "+" e | "a"?'}, False),
    "doubling rules": ({"grammar": doubling("a", 60)}, False),
    "doubling terminals": ({"grammar": doubling("A", 30)}, False),
    "2,000 optional properties": (
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}},
        False,
    ),
    "20,000 required properties": ({"json": {"type": "object", "required": [f"p{i}" for i in range(20_000)]}}, False),
    "intersections": (
        {"json": {"allOf": [{"type": "string", "pattern": f"^.*{c}.*{c}.*$"} for c in "abcdefghijkl"]}},
        False,
    ),
    "a long array": ({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**5}}, True),
    "a long text": ({"json": {"type": "string", "minLength": 10**6}}, True),
    "a large factor": ({"json": {"type": "integer", "multipleOf": 999_999_937}}, False),
    "a deep GBNF": ({"grammar": "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000}, False),
    "a chain of GBNF": (
        {"grammar": "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(400)) + '\nr400 ::= "b"\nroot ::= r0'},
        True,
    ),
    "a long GBNF": ({"grammar": "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000))}, False),
    "nothing but percents": ({"grammar": "start: %%%%"}, False),
    "a null byte": ({"regex": "\0+"}, True),
    "brackets that never close": ({"json": {"type": "string", "pattern": "[" * 19_000}}, False),
    "a pattern of 500,000": ({"json": {"type": "string", "pattern": "[^" * 250_000}}, False),
    "minima in minima": ({"json": '{"minimum":' * 900 + "[" + "0," * 400_000 + "0]" + "}" * 900}, False),
    "empty lines": ({"grammar": "\n" * 400_000 + 'start: "a"'}, True),
    "half a character": ({"json": '{"const": "\\ud800"}'}, False),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_works_or_fails_alone_within_bounds(compiler: GrammarCompiler, name: str) -> None:
    """Bounds are of the time of this thread, and wide: without limits some take minutes, or never come back."""
    structured, must_work = HOSTILE[name]
    began, random, num_tokens = time.thread_time(), np.random.default_rng(0), 0
    try:
        matcher = compiled(compiler, **structured).fork()
    except InvalidParameter as refusal:
        assert not must_work, refusal
    else:
        while num_tokens < 40:
            ids, over = allowed(compiler, matcher, ())
            if over:
                break
            assert ids and matcher.consume_token(int(random.choice(sorted(ids)))) or matcher.is_error()
            num_tokens += 1
        assert not (must_work and matcher.is_error()), error_of(matcher)
    assert time.thread_time() - began < 20 + num_tokens


def test_limits_are_set(compiler: GrammarCompiler) -> None:
    """An ambiguous grammar is given up where llguidance's own limits let it take seconds for one mask."""
    with pytest.raises(InvalidParameter, match="max is 600"):
        matcher = compiled(compiler, **HOSTILE["ambiguous"][0]).fork()
        for _ in range(400):
            if allowed(compiler, matcher, ())[1]:
                raise InvalidParameter(error_of(matcher))
            matcher.consume_token(TOKENIZER.token_id("a"))


def test_tokenizers_of_other_shapes(compiler: GrammarCompiler, tmp_path: Path) -> None:
    """Tokenizers whose vocabulary is wider than the model's, and of a kind that has no bytes."""
    narrow = GrammarCompiler(ByteTokenizer, 200)
    masks, over = narrow.masks([compiled(narrow, regex="[a-z]+").fork()], [()])
    ids = np.flatnonzero(np.unpackbits(masks.view(np.uint8), count=200, bitorder="little"))
    assert masks.shape == (1, 7) and "".join(map(chr, ids)) == "abcdefghijklmnopqrstuvwxyz" and not over


def test_the_tokenizer_is_loaded_once_and_late() -> None:
    loads = []
    late = GrammarCompiler(lambda: loads.append(1) or TOKENIZER, VOCAB)
    assert loads == []
    compiled(late, regex="a"), compiled(late, regex="b")
    assert loads == [1]


# --- the spec that travels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"regex": 5}, "Expected `str | null`, got `int` - at `$.regex`"),
        ({"choice": ["a", 2]}, "got `int` - at `$.choice[1]`"),
        ({"json": 5}, "at `$.json`"),
        ({"json": {"a": object()}}, "object"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"json": {"description": "x" * MAX_BYTES}}, "at most 1048576 are taken"),
        ({"regex": "a", "after": ""}, "after is empty"),
    ],
)
def test_what_is_no_structured_output_is_refused_before_it_travels(structured: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(words)):
        StructuredOutputsParams(**structured).spec()


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidParameter, match="recursion"):
        StructuredOutputsParams(json=schema).spec()

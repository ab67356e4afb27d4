"""A schema of which llguidance would hold only a part is refused or rewritten, at any depth."""

import json
import re
from typing import Any

import pytest

from quire.answers.grammar import GrammarCompiler, notes
from quire.answers.grammar_trial import GrammarTrial
from quire.answers.json_schema import LENIENT, holdable
from quire.answers.tool_grammar import tool_grammar
from quire.config.bundled import bundled_model
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import StructuredOutputsParams
from quire.text.output_styles import OutputStyles
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import PLAIN, TOOL_FORMATS

TOKENIZER = Tokenizer.load(bundled_model())
COMPILER = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size)


def takes(schema: Any, text: str, *, lark: bool = False) -> bool:
    """Return True if the masks of a schema allow a text. `lark`: of the schema in a grammar."""
    structured = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    if lark:
        structured = StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}")
    matcher = COMPILER.compile(structured.spec()).fork()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        masks, over = COMPILER.masks([matcher], [()])
        if over or not masks[0, token // 32] >> token % 32 & 1 or not matcher.consume_token(token):
            return False
    return matcher.is_stopped() or bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "contains": {}}, "contains"),
        ({"if": {}, "then": False}, "if is not implemented"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"propertyNames": {"not": {}}}, "propertyNames"),
        ({"not": {}}, "not is not implemented"),
        ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"),
        ({"properties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"unevaluatedProperties": False, "anyOf": [{}]}, "unevaluatedProperties"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: 0 and 1 may both hold of a value"),
        ({"patternProperties": {"^a": {}, "b$": {"type": "null"}}}, "are not disjoint"),
        ({"type": "object", "minProperties": 2}, "minProperties: 2 are more than are required"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties is not implemented beside properties"),
        *(
            ({"type": "string", "pattern": pattern}, f"pattern: {found} (a look-around, a back")
            for pattern, found in (
                ("^(?!a)b$", "(?!"),
                (r"(a)\1", r"\1"),
                (r"(?<=a)b", "(?<="),
                (r"\bb", r"\b"),
                (r"\cA", r"\c"),
            )
        ),
        ({"type": "string", "pattern": '[\\x00-"]'}, 'pattern: [\\x00-"] has control characters'),
        ({"type": "integer", "minimum": 2**53 + 1}, "not read exactly"),
        ({"const": -(2**63)}, "not read exactly"),
        ({"enum": [1, [2**64]]}, "not read exactly"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "is greater than"),
        ({"$ref": "https://example.com/a"}, "$ref: 'https://example.com/a' is not defined in the schema"),
        ({"$ref": "#nowhere"}, "$ref: '#nowhere' is not defined in the schema"),
        ({"enum": []}, "is empty"),
        ({"properties": {f"p{i}": {} for i in range(513)}}, "513 of its properties may be left out, at most 512 may"),
    ],
)
def test_what_cannot_be_held_is_refused_not_dropped(schema: dict[str, Any], words: str) -> None:
    """As schema, as a part of it, in a grammar, and as parameters of a strict tool. What Quire itself refuses has
    the same words everywhere, with the path."""
    within = {"type": "object", "properties": {"const": {"anyOf": [schema]}}, "required": ["const"]}
    lark = f'start: "a" a\na: %json {json.dumps(schema)} "b"'
    tool = {"type": "function", "function": {"name": "f", "parameters": within, "strict": True}}
    strict = tool_grammar(OutputStyles(tools=PLAIN, reasoning=None, why=""), [tool], "required", parallel=False)
    for structured, at in (
        ({"json": schema}, ""),
        ({"json": json.dumps(within)}, "properties.const.anyOf.0: "),
        ({"grammar": lark}, ""),
        ({"grammar": strict}, "f.parameters.properties.const.anyOf.0: "),
    ):
        with pytest.raises(InvalidParameter) as refusal:
            COMPILER.compile(StructuredOutputsParams(**structured).spec())
        assert words in str(refusal.value) or "Unsatisfiable" in str(refusal.value), structured
        if LENIENT in str(refusal.value):
            assert str(refusal.value).startswith(f"structured_outputs: the grammar cannot be used: {at}{words[:2]}")
            with pytest.raises(InvalidParameter) as same:
                notes(StructuredOutputsParams(**structured))
            assert str(same.value) == str(refusal.value)


OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("count", "good", "bad"),
    [
        ({"minProperties": 1}, ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ["{}"]),
        ({"maxProperties": 2}, ["{}"], []),
        ({"minProperties": 1, "required": ["a"]}, ['{"a":1}', '{"a":1,"b":1}'], ["{}", '{"b":1}']),
        ({"minProperties": 2, "required": ["a", "b"], "maxProperties": 2}, ['{"a":1,"b":1}'], ['{"a":1}']),
    ],
    ids=str,
)
def test_counts_of_properties_beside_some_that_may_be_left_out(
    count: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    schema = {**OBJECT, "properties": {"a": {"enum": [1]}, "b": {"enum": [1]}}, **count}
    assert [text for text in good if not takes(schema, text)] == []
    assert [text for text in bad if takes(schema, text)] == []


@pytest.mark.parametrize("kind", ["$ref", "oneOf", "pattern", "not"])
@pytest.mark.parametrize("row", ["plain", "qwen3_coder", "deepseek_v32", "glm45", "pythonic"])
def test_a_refusal_names_the_path_in_every_way_to_call(row: str, kind: str) -> None:
    """Strict, it is refused; if not, told, but for a reference to nothing, which nobody can mean."""
    wrong = {
        "$ref": {"$ref": "#/$defs/no"},
        "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "pattern": {"type": "string", "pattern": "(?!a)b"},
        "not": {"type": "string", "not": {"const": "a"}},
    }[kind]
    style = OutputStyles(tools=next(each for each in TOOL_FORMATS if row in each.names), reasoning=None, why="")
    parameters = {**OBJECT, "properties": {"a": wrong}, "required": ["a"]}
    for strict in (True, False):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        structured = StructuredOutputsParams(grammar=tool_grammar(style, [tool], "required", parallel=False))
        if strict or kind == "$ref":
            with pytest.raises(InvalidParameter, match=re.escape(f"cannot be used: f.parameters.properties.a: {kind}")):
                notes(structured)
        else:
            [note] = notes(structured)
            assert note.startswith(f"f.parameters.properties.a: {kind}")
            COMPILER.compile(structured.spec())


A, B = ({**OBJECT, "properties": {name: {"enum": [1]}}, "required": [name]} for name in "ab")
C = {**OBJECT, "properties": {"a": {"enum": [1]}, "b": {"enum": [1]}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#A"}, {"$ref": "#B"}], "$defs": {"A": {**A, "$anchor": "A"}, "B": {**B, "$anchor": "B"}}},
        {
            "$id": "https://x.org/s.json",
            "$defs": {"A": A, "B": B},
            "allOf": [{"$ref": "https://x.org/s.json#/$defs/A"}, {"$ref": "s.json#/$defs/B"}],
        },
        {
            "$id": "https://x.org/s.json",
            "allOf": [{"$ref": "a.json"}, {"$ref": "https://x.org/b.json"}],
            "$defs": {"A": {**A, "$id": "https://x.org/a.json"}, "B": {**B, "$id": "b.json"}},
        },
        {"$ref": "#A", "properties": B["properties"], "required": ["b"], "$defs": {"A": {**A, "$anchor": "A"}}},
        {"allOf": [{"$ref": "#/components/schemas/A"}, B], "components": {"schemas": {"A": A}}},
    ],
    ids=str,
)
def test_schemas_that_hold_together_stay_open_however_they_are_named(schema: dict[str, Any]) -> None:
    assert takes(schema, '{"a":1,"b":1}') and not takes(schema, '{"a":1}') and not takes(schema, '{"b":1}')


def test_a_keyword_behind_a_name_is_found() -> None:
    for reference, name in (("#A", {"$anchor": "A"}), ("https://x.org/a.json", {"$id": "https://x.org/a.json"})):
        schema = {"items": {"$ref": reference}, "properties": {"b": {"type": "integer", "not": {"const": 1}, **name}}}
        with pytest.raises(InvalidParameter, match="cannot be used: properties.b: not is not implemented"):
            notes(StructuredOutputsParams(json={**schema, "type": "array"}))


CAT, DOG = (
    {**OBJECT, "properties": {"kind": {"const": kind}, "n": {"type": "integer"}}, "required": ["kind"]}
    for kind in ("cat", "dog")
)
DEFS = {"$defs": {"c": CAT, "d": DOG, "both": {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}]}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, ["1", '"a"', "null"], ["true"]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3, "a"]}]}, ["1", "3"], ["4"]),
        ({"oneOf": [A, B]}, ['{"a":1}'], ["{}"]),
        ({"oneOf": [CAT, DOG]}, ['{"kind":"cat"}', '{"kind":"dog","n":3}'], ['{"kind":"cow"}', "{}"]),
        ({"oneOf": [{"$ref": "#/$defs/both"}, {"type": "null"}], **DEFS}, ["null", '{"kind":"cat"}'], ["1"]),
        (
            {"oneOf": [{"allOf": [{"$ref": "#/$defs/c"}, {"title": "Cat"}]}, {"$ref": "#/$defs/d"}], **DEFS},
            ['{"kind":"cat"}'],
            [],
        ),
        ({"oneOf": [{"anyOf": [{"type": "null"}, CAT]}, DOG]}, ["null", '{"kind":"dog"}'], []),
        ({"oneOf": [{"type": "array"}]}, ["[]"], ["1"]),
        (
            {
                **OBJECT,
                "properties": {"p": A},
                "required": ["p"],
                "oneOf": [
                    {"properties": {"p": {"properties": {"a": {"const": 1}}}}},
                    {"properties": {"p": {"type": "null"}}},
                ],
            },
            ['{"p":{"a":1}}'],
            [],
        ),
        ({"oneOf": [A, C]}, None, []),
        ({"oneOf": [A, {**B, "required": []}]}, None, []),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **OBJECT}, None, []),
        ({"oneOf": [{"type": "integer"}, {"enum": ["a", 1.0]}]}, None, []),
        ({"oneOf": [{"$ref": "#"}, {"type": "null"}]}, None, []),
    ],
    ids=str,
)
def test_one_of_takes_alternatives_that_exclude_each_other(
    schema: dict[str, Any], good: list[str] | None, bad: list[str]
) -> None:
    """By types, values and required properties; what an alternative is closed to does not count for the other: a value
    that was written for one must not be of both. `good` None: it is refused."""
    if good is None:
        with pytest.raises(InvalidParameter, match="oneOf: 0 and 1 may both hold of a value"):
            takes(schema, "")
        assert notes(StructuredOutputsParams(json={**schema, "x-guidance": {"lenient": True}})) == ["oneOf"]
        return
    assert [text for text in good if not takes(schema, text)] == []
    assert [text for text in bad if takes(schema, text)] == []


def test_hundreds_of_alternatives_take_a_moment_and_circles_end() -> None:
    many = [{**OBJECT, "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(60)]
    assert takes({"oneOf": many}, '{"k":59}')
    circle = {**OBJECT, "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}
    with pytest.raises(InvalidParameter, match="oneOf: 0 and 1"):
        notes(
            StructuredOutputsParams(
                json={"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": circle, "b": {**circle}}}
            )
        )


@pytest.mark.parametrize(
    ("schema", "noted", "good", "bad"),
    [
        (
            {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
            ["uniqueItems"],
            ["[1,2]", "[1,1]"],
            ["[3]"],
        ),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 1}, [], ["[]", "[1]"], ["[1,1]"]),
        ({"type": "array", "uniqueItems": False}, [], ["[1,1]"], []),
        *(
            ({"type": "string", "format": name}, [f"format {name}"], ['"any"'], ["1"])
            for name in (
                "path",
                "binary",
                "byte",
                "password",
                "ipv4network",
                "ipv6interface",
                "base64",
                "regex",
                "json-pointer",
                "uri-reference",
                "iri",
                "idn-email",
                "unknown",
                "postcode",
            )
        ),
        *(
            ({"type": kind, "format": name}, [f"format {name}"], ["12"], ['"a"'])
            for kind, name in (("integer", "int32"), ("integer", "int64"), ("number", "float"), ("number", "double"))
        ),
        ({"type": "string", "format": "ipv4"}, [], ['"127.0.0.1"'], ['"127.0.0.256"']),
        (
            {"type": "string", "format": "uuid4"},
            [],
            ['"0b9a2a1e-6b6b-4f6e-8f6e-0b9a2a1e6b6b"'],
            ['"0b9a2a1e-6b6b-1f6e-8f6e-0b9a2a1e6b6b"', '"0b9a2a1e-6b6b-4f6e-0f6e-0b9a2a1e6b6b"'],
        ),
        (
            {**OBJECT, "additionalProperties": {"enum": [1]}, "propertyNames": {"enum": ["a", "b"]}},
            [],
            ["{}", '{"a":1}', '{"a":1,"b":1}'],
            ['{"c":1}', '{"a":2}', '{"a":1,"a":1}'],
        ),
        (
            {
                **OBJECT,
                "additionalProperties": {"enum": [1]},
                "propertyNames": {"$ref": "#/$defs/n"},
                "$defs": {"n": {"title": "N", "const": "a"}},
            },
            [],
            ["{}", '{"a":1}'],
            ['{"b":1}', '{"a":2}'],
        ),
        (
            {**OBJECT, "additionalProperties": {"enum": [1]}, "propertyNames": {"minLength": 2, "maxLength": 3}},
            [],
            ["{}", '{"ab":1}', '{"\u00e9b\u00e9":1}'],
            ['{"a":1}', '{"abcd":1}', '{"ab":2}'],
        ),
        (
            {**OBJECT, "additionalProperties": {"enum": [1]}, "propertyNames": {"pattern": "^a"}},
            [],
            ['{"ab":1}'],
            ['{"b":1}', '{"ab":2}'],
        ),
        (
            {**OBJECT, "additionalProperties": {"enum": [1]}, "propertyNames": {"format": "path"}},
            ["propertyNames: format path"],
            ['{"a":1}'],
            ['{"a":2}'],
        ),
        (
            {**OBJECT, "additionalProperties": {"enum": [1]}, "propertyNames": {"format": "date"}},
            [],
            ["{}", '{"2024-02-28":1}'],
            ['{"2024-02-31":1}', '{"2024-02-28":2}'],
        ),
        ({**OBJECT, "properties": {"a": {"enum": [1]}}, "unevaluatedProperties": False}, [], ["{}"], ['{"b":1}']),
        ({"not": False, "type": "null", "dependentSchemas": {}, "then": {}}, [], ["null"], []),
        ({"type": "integer", "if": {"minimum": 3}, "then": {}, "else": True}, [], ["1"], []),
        ({"type": "integer", "if": {"minimum": 3}}, [], ["1"], []),
    ],
    ids=str,
)
def test_what_is_not_enforced_is_noted_with_its_path(
    schema: dict[str, Any], noted: list[str], good: list[str], bad: list[str]
) -> None:
    """As the schema and deep inside it."""
    defs = {"$defs": schema.get("$defs", {})}
    within = {**OBJECT, "properties": {"tags": {"type": "array", "items": schema}}, "required": ["tags"], **defs}
    for structured, before, after, path in ((schema, "", "", ""), (within, '{"tags":[', "]}", "properties.tags.items")):
        found = notes(StructuredOutputsParams(json=structured))
        assert [note.removeprefix(f"{path}.").removeprefix(f"{path}: ") for note in found] == noted
        assert all(note.startswith(path) for note in found)
        assert [text for text in good if not takes(structured, before + text + after)] == []
        assert [text for text in bad if takes(structured, before + text + after)] == []


def test_a_lenient_schema_is_taken_and_says_what_is_ignored() -> None:
    """The same switch for a schema and for a strict tool; without it a tool that is not strict is lenient."""
    contains = {**OBJECT, "properties": {"a\r\n": {"type": "array", "contains": {"type": "null"}}}}
    lenient = {**contains, "x-guidance": {"lenient": True}}
    assert notes(StructuredOutputsParams(json=lenient)) == [r"properties.a\r\n: contains"]
    assert takes(lenient, r'{"a\r\n":[1]}')
    for parameters, strict in ((lenient, True), (contains, False)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        structured = StructuredOutputsParams(
            grammar=tool_grammar(OutputStyles(tools=PLAIN, reasoning=None, why=""), [tool], "required", parallel=False)
        )
        assert notes(structured) == [r"f.parameters.properties.a\r\n: contains"]
        COMPILER.compile(structured.spec())


ONE = {"enum": [1]}
NAMED: dict[str, Any] = {**OBJECT, "properties": {"name": ONE, "q\n": ONE}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NAMED, ['{"name":1,"q\\n":1}'], ['{"b":1}']),
        (
            {**NAMED, "additionalProperties": ONE},
            ['{"name":1,"q\\n":1,"b":1}', '{"nam":1}', '{"name2":1}'],
            ['{"b":2}'],
        ),
        ({**NAMED, "patternProperties": {"^q": ONE}}, ['{"name":1,"qa":1}', '{"qa":1}'], ['{"b":1}', '{"qa":2}']),
        (
            {**NAMED, "patternProperties": {"^q": ONE}, "additionalProperties": {}},
            ['{"qa":1}', '{"b":2}'],
            ['{"qa":2}', r'{"\u0071a":2}'],
        ),
        ({**OBJECT, "required": ["name", "q\n"]}, ['{"name":2,"q\\n":2,"b":3}'], ["{}"]),
        (
            {"allOf": [NAMED, {"properties": {"b": ONE}, "required": ["b"]}]},
            ['{"name":1,"b":1}', '{"b":1,"c":3}'],
            ["{}"],
        ),
        ({**NAMED, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, ['{"b":1}', '{"c":1}'], ["{}"]),
        ({"$ref": "#/$defs/n", "required": ["b"], "$defs": {"n": NAMED}}, ['{"b":1,"c":1}'], ["{}"]),
    ],
    ids=str,
)
def test_an_object_has_no_listed_name_twice(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    r"""In a grammar, however it is spelled: JSON reads "\u006eame" as "name", and the last value wins. In a JSON schema
    `json_names` sees to the spelling. Where nothing is said of other names there are none, but for schemas that hold
    together with others.
    """
    for name in ('"name"', r'"\u006eame"', r'"n\u0061me"', r'"q\n"', r'"q\u000a"', r'"q\u000A"'):
        for before in ('{"name":1,"q\\n":1,', '{"name":1,"q\\n":1,"b":1,', '{"b":1,"name":1,"q\\n":1,'):
            for after in (":1}", ":2}", ':1,"b":1}'):
                assert not takes(schema, before + name + after, lark=True), before + name + after
    for lark in (False, True):
        assert [text for text in good if not takes(schema, text, lark=lark)] == []
        assert [text for text in bad if takes(schema, text, lark=lark) and r"\u" not in text] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"enum": ["x\u0001y"]}, r"x\u0001y"),
        ({"enum": ["x\x7fy"]}, r"x\u007fy"),
        ({"type": "string", "pattern": r"^a\x01$"}, r"a\u0001"),
        ({"type": "string", "pattern": "^[\x01-\x03]$"}, r"\u0002"),
    ],
    ids=str,
)
def test_values_keep_their_control_characters_beside_any_names(value: dict[str, Any], text: str) -> None:
    """In a grammar, too, where names have no such escapes."""
    for more in ({}, {"additionalProperties": True}, {"additionalProperties": {"type": "string"}}):
        schema = {**OBJECT, "properties": {"a": value}, "required": ["a"], **more}
        assert takes(schema, f'{{"a":"{text}"}}') and takes(schema, f'{{"a":"{text}"}}', lark=True), more


def test_literals_keep_their_control_characters() -> None:
    schema = {**NAMED, "additionalProperties": {"enum": ["a\u0001b", "\u0000"]}}
    for lark in (False, True):
        assert takes(schema, r'{"name":1,"c":"a\u0001b"}', lark=lark) and not takes(schema, '{"c":"ab"}', lark=lark)


@pytest.mark.parametrize("kind", [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], ids=str)
@pytest.mark.parametrize("extra", [{}, {"additionalProperties": True}], ids=str)
def test_500_properties_may_be_left_out(kind: dict[str, Any], extra: dict[str, Any]) -> None:
    schema = {**OBJECT, "properties": {f"property_{i}": kind for i in range(500)}, **extra}
    value = '"a"' if kind["type"] == "string" else '["a"]'
    some = ",".join(f'"property_{i}":{value}' for i in (0, 7, 70, 499))
    assert takes(schema, f"{{{some}}}") and takes(schema, "{}")
    assert not takes(schema, f'{{{some},"property_8":{value}}}')


def test_a_schema_that_is_open_in_too_many_ways_says_so() -> None:
    wide = [{**OBJECT, "properties": {f"p{n}_{i}": {"type": "string"} for i in range(500)}} for n in range(3)]
    with pytest.raises(InvalidParameter, match="too many ways to go on are open at once.*require more properties"):
        GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size, GrammarTrial()).compile(
            StructuredOutputsParams(json={"anyOf": wide}).spec()
        )


CLASSES = [
    '[^"]',
    r"[^\\]",
    "[^a]",
    r'[^"\\]',
    r'[^"\n]',
    r"[^\n]",
    r"[\x00-\x1f]",
    r"\S",
    ".",
    r'[^\x00-\x1f"]',
    "[ -~]",
    r"[\s\S]",
    r"[\n\t]",
    "[^!-/]",
    "[^A-z]",
]


@pytest.mark.parametrize("chars", CLASSES)
def test_a_class_takes_no_quote_and_no_backslash_that_it_excludes(chars: str) -> None:
    schema, known = {"type": "string", "pattern": f"^{chars}$"}, re.compile(chars)
    if chars == r"[\x00-\x1f]":
        with pytest.raises(InvalidParameter, match="has control characters"):
            takes(schema, "")
        return
    for char in '"\\\n\t/aZé':
        assert takes(schema, json.dumps(char, ensure_ascii=False)) == bool(known.fullmatch(char)), char


def test_a_range_wider_than_what_is_exact_becomes_what_is() -> None:
    """As generators write it for numbers of 64 bits: what then comes is within it."""
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-1e300, 2.0**60)):
        found = holdable({"type": "integer", "minimum": low, "exclusiveMaximum": high})
        assert found == {"type": "integer", "minimum": max(low, -(2**53)), "exclusiveMaximum": 2**53}


def test_what_looks_like_a_keyword_and_is_none_stays_as_it_is() -> None:
    """Names of properties, and data."""
    data = {"pattern": '[^"]', "minProperties": 5, "format": "unknown", "minimum": 2**60}
    assert takes({"const": data}, json.dumps(data, separators=(",", ":")))
    assert takes(
        {"properties": {"minimum": {"type": "null"}, "const": {"maximum": 3, "type": "integer"}}, "type": "object"},
        '{"minimum":null,"const":3}',
    )
    lenient = {"x-guidance": {"lenient": True}, "type": "integer", "maximum": 2**60}
    assert takes(lenient, "5")


def test_a_grammar_keeps_the_words_that_only_look_like_a_schema() -> None:
    structured = StructuredOutputsParams(grammar='start: "%json {" "x" /[^"]/').spec()
    matcher = COMPILER.compile(structured).fork()
    assert all(matcher.consume_token(token) for token in TOKENIZER.encode("%json {x"))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "date"}, ["0001-01-01", "2024-02-29", "2000-02-29", "9999-12-31"], ["0000-01-01", "0000-02-29"]),
        ({"format": "date"}, [], ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01"]),
        ({"format": "date-time"}, ["0001-01-01T00:00:00Z"], ["0000-01-01T00:00:00Z", "2024-01-01T00:00:60Z"]),
        ({"format": "time"}, ["23:59:59Z"], ["23:59:60Z"]),
        ({"format": "date", "pattern": "^[0-2]"}, ["2024-02-29"], ["3024-02-29", "0000-01-01"]),
        ({"format": "date", "pattern": "^[0-2]", "allOf": [{"pattern": "9$"}]}, ["2024-02-29"], ["2024-02-28"]),
        ({"format": "uuid4", "pattern": "^0"}, [], ["0b9a2a1e-6b6b-1f6e-8f6e-0b9a2a1e6b6b"]),
    ],
)
def test_dates_and_times_are_those_that_programs_can_read(schema: Any, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", **schema}
    assert all(takes(json.loads(json.dumps(schema)), json.dumps(text)) for text in good)
    assert not any(takes(json.loads(json.dumps(schema)), json.dumps(text)) for text in bad)
    assert notes(StructuredOutputsParams(json=schema)) == []


def test_a_date_beside_an_all_of_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidParameter):
        takes({"type": "string", "format": "date", "pattern": "^2", "allOf": 5}, '"2024-01-01"')

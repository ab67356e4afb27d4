"""Where llguidance would hold an output to less than a schema says, it is refused, wherever it stands, or rewritten."""

import json
import re
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import StructuredOutputsParams
from quire.text.grammar import GrammarCompiler
from quire.text.json_schema import holdable
from quire.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(bundled_model())
COMPILER = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size)


def takes(schema: Any, text: str) -> bool:
    """Whether a text is one of a schema, judged by the masks."""
    matcher = COMPILER.compile(StructuredOutputsParams(json=schema, disable_any_whitespace=True).spec()).fork()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        masks, over = COMPILER.masks([matcher], [()])
        if over or not masks[0, token // 32] >> token % 32 & 1 or not matcher.consume_token(token):
            return False
    return matcher.is_stopped() or bool(matcher.is_accepting())


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"type": "array", "contains": {}}, "contains"), ({"if": {}, "then": {}}, '"if", "then"'),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"), ({"dependentSchemas": {}}, "dependentSchemas"),
    ({"propertyNames": {"maxLength": 3}}, "propertyNames"), ({"not": {}}, '"not"'),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"), ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
    ({"patternProperties": {"^a": {}, "b$": {"type": "null"}}}, "are not disjoint"),
    ({"type": "object", "minProperties": 2}, "minProperties counts a name that is written twice"),
    ({"type": "string", "pattern": "^(?!a)b$"}, "look-around"), ({"type": "string", "pattern": r"(a)\1"}, "backref"),
    ({"type": "string", "pattern": '[\\x00-"]'}, "has control characters"),
    ({"type": "string", "format": "iri"}, "Unknown format: iri"),
    ({"type": "string", "format": "unknown"}, "Unknown format: unknown"),
    ({"type": "integer", "minimum": 2**53 + 1}, "not read exactly"), ({"const": -(2**63)}, "not read exactly"),
    ({"enum": [1, [2**64]]}, "not read exactly"), ({"minimum": 3, "maximum": 2, "type": "integer"}, "is greater than"),
    ({"$ref": "https://example.com/a"}, "retrieving it failed"), ({"enum": []}, "is empty"),
])  # fmt: skip
def test_what_cannot_be_held_is_refused_not_dropped(schema: dict[str, Any], words: str) -> None:
    """As the form, as a part of it, and in a grammar."""
    within = {"type": "object", "properties": {"const": {"anyOf": [schema]}}, "required": ["const"]}
    lark = f'start: "a" a\na: %json {json.dumps(schema)} "b"'
    for form in ({"json": schema}, {"json": json.dumps(within)}, {"grammar": lark}):
        with pytest.raises(InvalidParameter) as refusal:
            COMPILER.compile(StructuredOutputsParams(**form).spec())
        assert words in str(refusal.value) or "Unsatisfiable" in str(refusal.value), form


CLASSES = ['[^"]', r"[^\\]", "[^a]", r'[^"\\]', r'[^"\n]', r"[^\n]", r"[\x00-\x1f]", r"\S", ".", r'[^\x00-\x1f"]', 
           "[ -~]", r"[\s\S]", r"[\n\t]", '[^!-/]', "[^A-z]"]  # fmt: skip


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
    assert takes({"properties": {"minimum": {"type": "null"}, "const": {"maximum": 3, "type": "integer"}},
                  "type": "object"}, '{"minimum":null,"const":3}')
    lenient = {"x-guidance": {"lenient": True}, "type": "integer", "maximum": 2**60}
    assert takes(lenient, "5")


def test_a_grammar_keeps_the_words_that_only_look_like_a_schema() -> None:
    form = StructuredOutputsParams(grammar='start: "%json {" "x" /[^"]/').spec()
    matcher = COMPILER.compile(form).fork()
    assert all(matcher.consume_token(token) for token in TOKENIZER.encode("%json {x"))

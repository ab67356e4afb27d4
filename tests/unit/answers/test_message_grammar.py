"""Grammars of answers in harmony's messages: token sequences that they allow and forbid, and where they may end."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.answers.choice_parser import ChoiceParser, ParserPlan
from quire.answers.grammar import GrammarCompiler
from quire.answers.message_grammar import message_grammar
from quire.contracts.errors import InvalidParameter
from quire.contracts.output import CompletionOutput
from quire.contracts.sampling import SamplingParams
from quire.contracts.structured import StructuredOutputsParams
from quire.text.output_styles import OutputStyles
from quire.text.tool_formats import MESSAGE_FORMATS

from ...support.harmony_tokenizer import HarmonyTokenizer

pytest.importorskip("llguidance")
TOKENIZER = HarmonyTokenizer()
FORMAT = MESSAGE_FORMATS[0]
COMPILER = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size)
ENDERS = [TOKENIZER.token_id(token) for token in ("<|return|>", "<|call|>")]
OPENED = TOKENIZER.encode("<|start|>assistant", False)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = StructuredOutputsParams(json=CITY | {"additionalProperties": False})
AGAIN = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm, {{}} <b>{AGAIN}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{AGAIN}"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather"
ARGUMENTS = '{"city": "Oslø"}'


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


def made(**options: Any) -> Any:
    """A matcher of a grammar."""
    structured = message_grammar(FORMAT, TOKENIZER, OPENED, **options)
    return COMPILER.compile(structured.spec()).fork()


def fits(matcher: Any, text: str) -> tuple[int, bool]:
    """(number of tokens that the grammar refuses at the end of a text, True if the turn may end behind the others)."""
    ids = TOKENIZER.encode(text, False)
    taken = matcher.try_consume_tokens(ids)
    masks, over = COMPILER.masks([matcher], [ENDERS])
    ends = [bool(np.uint32(masks[0][i // 32]) >> i % 32 & 1) for i in ENDERS if i is not None]
    assert len(set(ends)) == 1
    return len(ids) - taken, ends[0] or bool(over)


def test_a_schema_holds_the_final_message_and_nothing_before() -> None:
    for lead in ("", THOUGHT, THOUGHT * 2, PREAMBLE, THOUGHT + PREAMBLE):
        for header in (
            FINAL,
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>final<|constrain|>json<|message|>",
        ):
            assert fits(made(answer=SCHEMA), lead + header + '{"city": "a"}') == (0, True)
    assert fits(made(answer=SCHEMA), FINAL) == (0, False)
    assert fits(made(answer=SCHEMA), FINAL + '{"city": "a"') == (0, False)
    assert fits(made(answer=SCHEMA), THOUGHT) == (0, False)
    assert fits(made(answer=SCHEMA), "<|channel|>analysis<|message|>a") == (0, False)
    assert fits(made(answer=SCHEMA), FINAL + "Oslo")[0] == 4
    assert fits(made(answer=SCHEMA), FINAL + "{}")[0] == 1
    assert fits(made(answer=SCHEMA), CALL)[0] > 0
    assert fits(made(answer=SCHEMA), FINAL + '{"city": "<|end|>')[0] == 1


def test_structure_is_special_tokens_and_not_their_text() -> None:
    matcher = made(answer=SCHEMA)
    assert matcher.try_consume_tokens(TOKENIZER.spelled("<|channel|>")) == 0
    ids = TOKENIZER.encode("<|channel|>analysis<|message|>", False) + TOKENIZER.spelled("<|end|><|call|>")
    assert matcher.try_consume_tokens(ids) == len(ids)  # text of the reasoning
    assert fits(matcher, "<|end|>") == (0, False)


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (StructuredOutputsParams(json_object=True), '{"a": [1]}', "[1]"),
        (StructuredOutputsParams(json=True), "[1]", "x"),
        (StructuredOutputsParams(json=json.dumps(CITY)), '{"city":\n  "a"}', "[1]"),
        (StructuredOutputsParams(regex="[ab]/[0-9]{2}\n"), "a/12\n", "c"),
        (StructuredOutputsParams(choice=["yes", "no\n"]), "no\n", "maybe"),
        (StructuredOutputsParams(json=CITY, disable_any_whitespace=True), '{"city":"a"}', '\n{"city":"a"}'),
    ],
)
def test_kinds_of_answers(answer: StructuredOutputsParams, good: str, bad: str) -> None:
    assert fits(made(answer=answer), THOUGHT + FINAL + good) == (0, True)
    assert fits(made(answer=answer), THOUGHT + FINAL + bad)[0] > 0


@pytest.mark.parametrize(
    "answer",
    [
        StructuredOutputsParams(grammar="start: A\nA: /a/"),
        StructuredOutputsParams(json="{"),
        StructuredOutputsParams(json=False),
        StructuredOutputsParams(json="3"),
        StructuredOutputsParams(choice=[]),
    ],
)
def test_kinds_of_answers_that_are_refused(answer: StructuredOutputsParams) -> None:
    with pytest.raises(InvalidParameter, match="structured_outputs"):
        message_grammar(FORMAT, TOKENIZER, OPENED, answer=answer)


def test_a_required_call() -> None:
    tools = [tool(), tool("time")]
    for lead in ("", THOUGHT, PREAMBLE):
        for header in (
            CALL,
            CALL + " <|constrain|>json",
            CALL + "<|constrain|>json",
            CALL + " json",
            " to=functions.time<|channel|>commentary",
            " to=functions.time<|channel|>analysis <|constrain|>json",
        ):
            assert fits(made(tools=tools, must=True), lead + header + "<|message|>" + ARGUMENTS) == (0, True)
    assert fits(made(tools=tools, must=True), CALL + "<|message|>{}")[0] == 1
    assert fits(made(tools=tools, must=True), FINAL)[0] > 0
    assert fits(made(tools=tools, must=True), "<|channel|>commentary to=functions.other<|message|>")[0] > 0
    assert fits(made(tools=tools, must=True), "<|channel|>analysis<|message|>a") == (0, False)


def test_a_call_or_an_answer() -> None:
    tools = [tool(strict=True)]
    assert fits(made(tools=tools), THOUGHT + FINAL + "any {text") == (0, True)
    assert fits(made(tools=tools), THOUGHT + CALL + "<|message|>" + ARGUMENTS) == (0, True)
    assert fits(made(tools=tools, answer=SCHEMA), THOUGHT + CALL + "<|message|>" + ARGUMENTS) == (0, True)
    assert fits(made(tools=tools, answer=SCHEMA), FINAL + '{"city": "a"}') == (0, True)
    assert fits(made(tools=tools, answer=SCHEMA), FINAL + "any")[0] == 3


def test_a_prompt_that_has_begun_the_answer() -> None:
    begun = TOKENIZER.encode("<|start|>assistant<|channel|>final<|message|>", False)
    assert message_grammar(FORMAT, TOKENIZER, begun, answer=SCHEMA) is SCHEMA
    for options in ({"tools": [tool()], "must": True}, {"tools": [tool()], "answer": SCHEMA}):
        with pytest.raises(InvalidParameter, match="continue_final_message"):
            message_grammar(FORMAT, TOKENIZER, begun, **options)
    header = TOKENIZER.encode("<|start|>assistant<|channel|>final", False)
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        message_grammar(FORMAT, TOKENIZER, header, answer=SCHEMA)


def test_random_answers_of_a_grammar_are_read_as_it_says() -> None:
    styles = OutputStyles(None, None, "", FORMAT)
    texts = [
        THOUGHT,
        PREAMBLE,
        CALL + "<|message|>",
        " to=functions.weather",
        FINAL,
        ARGUMENTS,
        "<|end|>",
        '"',
        "}",
        "a",
    ]
    spelled = [TOKENIZER.encode(text, False) for text in texts]
    done = 0
    for seed in range(30):
        rng, matcher, ids = Random(seed), made(tools=[tool()], must=True), list[int]()
        for _ in range(60):
            known = [tokens for tokens in spelled if matcher.validate_tokens(tokens) == len(tokens)]
            if not known:
                break
            matcher.consume_tokens(chosen := rng.choice(known))
            ids += chosen
            if fits(matcher.deep_copy(), "")[1]:
                done += 1
                parser = ChoiceParser(
                    ParserPlan(styles=styles, tools=(tool(),), opened=tuple(OPENED)),
                    SamplingParams(skip_special_tokens=False),
                    TOKENIZER,
                )
                text = TOKENIZER.decode(ids, skip_special_tokens=False)
                piece = CompletionOutput(index=0, text=text, token_ids=ids, finish_reason="stop")
                parser.events(piece)
                assert parser.finish_reason(piece) == "tool_calls", text
                break
    assert done > 5

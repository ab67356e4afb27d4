"""Structured output of the bundled model, at both depths: it obeys, whatever else is asked, and fails alone."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.contracts.errors import InvalidParameter, RequestFailed

from ..support.full import full_rows

S: dict[str, Any] = {"type": "string", "maxLength": 12}
N: dict[str, Any] = {"type": "integer", "minimum": -5, "maximum": 500}
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
TREE: dict[str, Any] = {
    "$defs": {"leaf": {"type": "object", "properties": {"v": N}, "required": ["v"], "additionalProperties": False},
              "node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}, "name": WORD},
                       "required": ["left", "name"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip


def thing(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*(required or properties)],
        "additionalProperties": False,
    }


def nested(depth: int) -> dict[str, Any]:
    return thing(a=nested(depth - 1)) if depth else {"type": "boolean"}


SCHEMAS: list[dict[str, Any]] = [
    thing(name=S, age=N),
    thing("a", a=WORD, b=N, c=S),
    thing("x", x=N, y={"type": "null"}),
    thing(n={"type": "boolean"}),
    thing(deep=thing(deeper=thing(deepest=WORD))),
    nested(12),
    TREE,
    {"type": "array", "items": N, "maxItems": 4},
    {"type": "array", "items": WORD, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [N, WORD], "items": False, "minItems": 2},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "one", None, True, [1], {"one": 1}]},
    {"const": {"k": [1, "ü"]}},
    {"enum": [f"item number {i}" for i in range(2_000)]},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": ["integer", "null"], "minimum": 3, "maximum": 5},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"anyOf": [thing(kind={"const": "a"}, a=N), thing(kind={"const": "b"}, b=WORD)]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"type": "boolean"}]},
    {
        "allOf": [
            thing(a=N) | {"additionalProperties": True},
            {"required": ["b"], "properties": {"b": WORD}},
            {"maxProperties": 2, "required": ["a", "b"], "properties": {"a": True, "b": True}},
        ]
    },
    thing(**{"ключ": WORD, "naïve": N, "😀": {"type": "boolean"}, 'q"uo\\te': N}),
    {"type": "object", "additionalProperties": N, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": N}, "additionalProperties": False, "maxProperties": 2},
    thing(email={"type": "string", "format": "email", "maxLength": 30}, ok={"type": "boolean"}),
    thing(
        items={
            "type": "array",
            "items": thing(id=N, tags={"type": "array", "items": WORD, "maxItems": 2}),
            "minItems": 1,
            "maxItems": 2,
        }
    ),
    thing(
        m={
            "type": "array",
            "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
    thing(**{f"p{i}": {"enum": [i, -i]} for i in range(25)}),
]


OPTIONS: dict[str, Any] = {"max_num_seqs": 48, "max_model_len": 512, "num_gpu_blocks_override": 400}


@pytest.fixture(scope="module", params=[2, *full_rows([1])], ids=lambda depth: f"depth{depth}")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(async_depth=request.param, **OPTIONS) as made:
        yield made
        made.engine.core.check()


def structured(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def ask(llm: LLM, params: list[SamplingParams] | SamplingParams, prompts: Any = None) -> list[RequestOutput]:
    prompts = prompts or [f"Example {i}: " for i in range(len(params) if isinstance(params, list) else 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.core.check()
    return outputs


def said(output: RequestOutput, index: int = 0) -> str:
    return output.outputs[index].text


def valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("temperature", [1.0, *full_rows([0.0])])
def test_every_output_is_valid_and_without_the_form_none_is(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=350,
            structured_outputs=structured(json=schema, disable_any_whitespace=True),
        )
        for i, schema in enumerate(SCHEMAS)
    ]
    outputs = ask(llm, params)
    wrong = [
        (said(o), o.outputs[0].finish_reason, schema)
        for o, schema in zip(outputs, SCHEMAS, strict=True)
        if o.outputs[0].finish_reason != "stop" or not valid(said(o), schema)
    ]
    assert wrong == []
    free = ask(llm, [p.clone(structured_outputs=None, max_tokens=40) for p in params])
    assert sum(valid(said(o), schema) for o, schema in zip(free, SCHEMAS, strict=True)) == 0


def test_the_same_at_both_depths_alone_and_in_a_batch(llm: LLM) -> None:
    """Noise and masks depend on nothing but the request, so each request has the same answer in every run."""
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=120, structured_outputs=structured(json=schema))
        for i, schema in enumerate(SCHEMAS[:6])
    ]
    together = [said(o) for o in ask(llm, params)]
    alone = [said(ask(llm, p, [f"Example {i}: "])[0]) for i, p in enumerate(params)]
    with LLM(async_depth=1, **OPTIONS) as other:
        assert together == alone == [said(o) for o in ask(other, params)]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,8} [0-9]{4}"}, r"[A-Z][a-z]{2,8} [0-9]{4}"),
        ({"choice": ["yes", "no", "not sure"]}, "yes|no|not sure"),
        ({"grammar": 'start: "[" INT ("," INT)~3 "]"\nINT: /[0-9]{1,3}/'}, r"\[\d{1,3}(,\d{1,3}){3}\]"),
        ({"grammar": 'root ::= "<" [a-z]+ ">" [0-9] [0-9]'}, r"<[a-z]+>\d\d"),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*"),
    ],
)
def test_every_kind_of_grammar(llm: LLM, fields: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, structured_outputs=structured(**fields))
    for output in ask(llm, [params.clone(seed=i) for i in range(4)]):
        assert re.fullmatch(pattern, said(output), re.DOTALL) or output.outputs[0].finish_reason == "length"


def test_with_everything_else_that_sampling_can_do(llm: LLM) -> None:
    """Penalties, filters, bias, bad words, logprobs of the raw logits, stop strings, n > 1, and a row that is free."""
    tokenizer, digits = llm.get_tokenizer(), structured(regex="[0-9]{12}")
    nine = tokenizer.token_id("9")
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0},
        {"top_k": 5, "top_p": 0.5},
        {"min_p": 0.2},
        {"logit_bias": {nine: 50.0}},
        {"bad_words": ["7"]},
        {"logprobs": 3},
        {"stop": ["3"]},
        {"n": 3},
        {"min_tokens": 30},
        {"ignore_eos": True},
        {"stop_token_ids": [nine]},
        {"max_tokens": 5},
        {"temperature": 0.0},
        {"allowed_token_ids": [tokenizer.token_id(d) for d in "012"]},
    ]
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": 40} | fields, structured_outputs=digits)
        for i, fields in enumerate(settings)
    ]
    outputs = ask(llm, [*params, SamplingParams(temperature=0.0, max_tokens=8)])
    found = {next(iter(fields)): output for fields, output in zip(settings, outputs[:-1], strict=True)}
    for name in (
        "repetition_penalty",
        "top_k",
        "min_p",
        "logit_bias",
        "bad_words",
        "logprobs",
        "min_tokens",
        "ignore_eos",
        "temperature",
        "allowed_token_ids",
    ):
        assert re.fullmatch("[0-9]{12}", said(found[name])) and found[name].outputs[0].finish_reason == "stop", name
    assert said(found["logit_bias"]) == "9" * 12 and "7" not in said(found["bad_words"])
    assert set(said(found["allowed_token_ids"])) <= set("012") and re.fullmatch("[0-9]{5}", said(found["max_tokens"]))
    assert found["max_tokens"].outputs[0].finish_reason == "length"
    assert re.fullmatch("[0-24-9]{0,12}", said(found["stop"])) and found["stop"].outputs[0].finish_reason == "stop"
    assert len({said(found["n"], i) for i in range(3)}) == 3
    assert all(re.fullmatch("[0-9]{12}", said(found["n"], i)) for i in range(3))
    rows = found["logprobs"].outputs[0].logprobs
    assert rows is not None and len(rows) == 12
    assert any(not entry.decoded_token.isdigit() for row in rows for entry in row.values())  # raw: nothing is masked
    plain = ask(llm, SamplingParams(temperature=0.0, max_tokens=8), [f"Example {len(params)}: "])
    assert said(outputs[-1]) == said(plain[0])


def test_special_tokens_inside_a_form_are_shown(llm: LLM) -> None:
    """A tag of reasoning may be a special token, and stands in a text like any other."""
    tag = llm.get_tokenizer().token_id("<think>")
    params = SamplingParams(
        max_tokens=40,
        temperature=0.0,
        logit_bias={tag: 80.0},
        structured_outputs=StructuredOutputsParams(regex="a(<think>|b)c"),
    )
    (output,) = llm.generate(["So "], params, use_tqdm=False)
    assert output.outputs[0].text == "a<think>c" and tag in output.outputs[0].token_ids


def test_what_is_asked_of_the_text_after_the_reasoning(llm: LLM) -> None:
    """The mask is off until the model closes its thoughts, which a bias makes it do soon."""
    closing = llm.get_tokenizer().token_id("</think>")
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=80,
            skip_special_tokens=False,
            logit_bias={closing: 18.0},
            structured_outputs=structured(json=thing(a=N), after="</think>"),
        )
        for i in range(6)
    ]
    answers = [said(o).partition("</think>") for o in ask(llm, params)]
    assert sum(bool(mark) for _, mark, _ in answers) >= 3 and any(thought for thought, _, _ in answers)
    assert all(valid(answer, thing(a=N)) for _, mark, answer in answers if mark)


def test_what_is_wrong_with_a_grammar_is_said_to_its_caller_alone(llm: LLM) -> None:
    good = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=structured(choice=["fine"]))
    bad = SamplingParams(max_tokens=20, structured_outputs=structured(json={"type": "strin"}))
    first, second = ask(llm, [bad, good])
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("error", "invalid_grammar")
    assert "Invalid type: strin" in (first.outputs[0].error or "") and said(second) == "fine"


def test_nothing_left_to_sample_fails_alone(llm: LLM) -> None:
    letter = llm.get_tokenizer().token_id("x")
    none = SamplingParams(allowed_token_ids=[letter], max_tokens=9, structured_outputs=structured(regex="[0-9]+"))
    first, second = ask(llm, [none, SamplingParams(temperature=0.0, max_tokens=3)])
    assert first.outputs[0].stop_reason == "no_token" and second.outputs[0].finish_reason == "length"


def test_preempted_requests_go_on_in_their_grammar() -> None:
    schema = thing(**{f"p{i}": {"enum": [i * 11, "text"]} for i in range(12)})
    with LLM(async_depth=2, max_num_seqs=8, max_model_len=224, num_gpu_blocks_override=14, block_size=16) as small:
        params = SamplingParams(temperature=1.0, max_tokens=200, structured_outputs=structured(json=schema))
        outputs = ask(small, [params.clone(seed=i) for i in range(8)])
        assert small.engine.core.scheduler.num_preempted > 0
    ended = [o for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert len(ended) > 4 and all(valid(said(o), schema) for o in ended)


def test_an_engine_without_a_tokenizer_refuses() -> None:
    with LLM(skip_tokenizer_init=True, max_model_len=64) as bare:
        with pytest.raises(InvalidParameter, match="structured_outputs needs a tokenizer"):
            bare.generate([[5, 6]], SamplingParams(structured_outputs=structured(regex="a"), detokenize=False))


def test_streams_and_their_errors() -> None:
    async def run() -> tuple[str, str]:
        async with AsyncLLM(max_model_len=128) as served:
            params = SamplingParams(structured_outputs=structured(choice=["only this"]))
            async for output in served.generate("x", params):
                whole = said(output)
            try:
                async for output in served.generate("x", SamplingParams(structured_outputs=structured(regex="(a"))):
                    return whole, said(output)
            except RequestFailed as failure:
                return whole, f"{failure.code}: {failure}"
        return whole, "nothing"

    whole, failure = asyncio.run(run())
    assert whole == "only this" and failure.startswith("invalid_grammar: ") and "unclosed group" in failure

"""A hundred schemas that nobody wrote, on the bundled model: every output is one of its schema, whatever else is
asked and whoever is beside, and without the schema hardly any is. The same ones in every run: that of number i at a
depth is `Maker(1000 * depth + i)`'s. 2,000 of them with QUIRE_FULL=1.
"""

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.contracts.errors import RequestFailed

from ..support.full import full_rows
from .pydantic_models import HELD, models
from .schemas import TRICKY, Maker, Schema, begins, fault

MOST = 400  # tokens of an output; with the bias hardly any needs them
SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 1.5}, {"n": 2}, {"stop": ["\u0000", "never of a text"]}, {"logprobs": 2, "top_k": 40},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": -0.1}, {"top_p": 0.9, "min_p": 0.001},
    {"min_tokens": 3}, {"priority": -1}, {"n": 3, "temperature": 0.7, "logprobs": 0},
]  # fmt: skip


def enders(llm: LLM) -> dict[int, float]:
    """A bias towards what ends values and against digits, which a small model here writes without end."""
    tokenizer, closing = llm.get_tokenizer(), (b'"', b"}", b"]")
    texts = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    return {
        tokenizer.eos_token_id or 0: 6.0,
        **{i: 6.0 for i, text in texts.items() if text[:1] in closing},
        **{i: -6.0 for i, text in texts.items() if text.isdigit()},
    }


def constrained(llm: LLM, schemas: list[Schema]) -> list[SamplingParams]:
    bias = enders(llm)
    return [
        SamplingParams(
            **{"temperature": 1.0, "seed": i, "max_tokens": MOST, "logit_bias": bias}
            | {k: v for k, v in SETTINGS[i % len(SETTINGS)].items() if k != "priority"},
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for i, schema in enumerate(schemas)
    ]


def ask(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.core.check()
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_every_output_is_one_of_its_schema(depth: int, full: bool) -> None:
    """In one batch with requests that are free, which get the tokens that they get without the others and grow until
    they alone need more than the cache, so that some are preempted; and then all without a schema."""
    count = 1000 if full else 72 if depth == 2 else 14
    tricky = list(TRICKY.values()) if depth == 2 or full else []
    schemas = tricky + [Maker(1000 * depth + i).schema() for i in range(count - len(tricky))]
    prompts = [f"Write JSON number {i}: " for i in range(count)]
    with LLM(async_depth=depth, max_num_seqs=64, max_model_len=448, block_size=16, num_gpu_blocks_override=36) as llm:
        formed = constrained(llm, schemas)
        free = [SamplingParams(temperature=i % 2, seed=i, max_tokens=100, ignore_eos=True) for i in range(6)]
        alone = ask(llm, prompts[:6], free)
        before = llm.engine.core.scheduler.num_preempted
        outputs = ask(llm, prompts[:6] + prompts, free + formed)
        assert llm.engine.core.scheduler.num_preempted > before
        assert [o.outputs[0].token_ids[:12] for o in outputs[:6]] == [o.outputs[0].token_ids[:12] for o in alone]
        answers = [
            (answer, schema) for output, schema in zip(outputs[6:], schemas, strict=True) for answer in output.outputs
        ]
        whole = [(a, schema) for a, schema in answers if a.finish_reason == "stop"]
        cut = [(a, schema) for a, schema in answers if a.finish_reason == "length"]  # names of properties have no end
        assert [(a.finish_reason, a.error, s) for a, s in answers if a.finish_reason not in ("stop", "length")] == []
        print(f"depth {depth}: {count} schemas, {len(answers)} outputs, {len(cut)} of them cut off")
        assert [(a.text, wrong, schema) for a, schema in whole if (wrong := fault(a.text, schema))] == []
        assert [(a.text, schema) for a, schema in cut if not begins(a.text, schema)] == []
        assert len(cut) <= len(answers) // 50
        without = ask(llm, prompts, [p.clone(structured_outputs=None, max_tokens=40) for p in formed])
        lucky = [
            a.text for o, schema in zip(without, schemas, strict=True) for a in o.outputs if not fault(a.text, schema)
        ]
        print(f"without the schema {len(lucky)} of {len(answers)} are valid: {lucky[:5]}")
        assert len(lucky) <= len(answers) // 50


def test_every_output_is_one_of_its_pydantic_model() -> None:
    """The schema judges, but for what a warning says is not enforced; and the model, where the schema says all."""
    shapes = models()
    schemas = {name: model.model_json_schema() for name, model in shapes.items()}
    names = [name for name in shapes for _ in range(2)]
    with LLM(max_num_seqs=32, max_model_len=256, num_gpu_blocks_override=600) as llm:
        params = [each.clone(max_tokens=100) for each in constrained(llm, [schemas[name] for name in names])]
        outputs = ask(llm, [f"An object with a field ({name}): " for name in names], params)
    answers = [(name, answer) for name, output in zip(names, outputs, strict=True) for answer in output.outputs]
    assert {answer.finish_reason for _, answer in answers} <= {"stop", "length"}
    whole = [(name, answer.text) for name, answer in answers if answer.finish_reason == "stop"]
    assert {name for name, _ in whole} == set(shapes)
    loose = re.compile(r', "uniqueItems": true|"propertyNames": {"format": "uuid"}, ')
    judged = {name: json.loads(loose.sub("", json.dumps(one))) for name, one in schemas.items()}
    assert [(name, text, wrong) for name, text in whole if (wrong := fault(text, judged[name]))] == []
    for name, text in whole:
        if name in HELD:
            shapes[name].model_validate_json(text)


@pytest.mark.parametrize("depth", [2, *full_rows([1])])
def test_no_object_has_a_name_twice(depth: int) -> None:
    """Of few names that are free, in objects within objects; where the names run out, the answer still comes."""

    def names(pairs: list[tuple[str, Any]]) -> list[str]:
        found = [name for name, _ in pairs]
        assert len({*found}) == len(found), pairs
        return found

    def few(most: int, value: Schema, pattern: str = "^[ab]{1,2}$") -> Schema:
        return {
            "type": "object",
            "patternProperties": {pattern: value},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": most,
        }

    listed = {"type": "array", "items": few(2, {"const": 1}), "maxItems": 2}
    schemas = [
        few(5, {"enum": [1]}),
        few(2, few(3, {"enum": [1]})),
        few(4, listed),
        few(5, {"const": 1}) | {"properties": {"b": {"const": 1}}, "required": ["b"]},
    ] * 6
    with LLM(async_depth=depth, max_num_seqs=32, max_model_len=256) as llm:
        tokenizer = llm.get_tokenizer()
        bias = {i: -20.0 for i in range(tokenizer.vocab_size) if b"}" in tokenizer.token_bytes(i)}
        params = [
            SamplingParams(
                temperature=1.5,
                seed=seed,
                max_tokens=150,
                logit_bias=bias,
                structured_outputs=(StructuredOutputsParams(json=schema, disable_any_whitespace=True)),
            )
            for seed, schema in enumerate(schemas)
        ]
        outputs = ask(llm, ["names: "] * len(schemas), params)
        scarce = params[0].clone(structured_outputs=StructuredOutputsParams(json=few(3, {"const": 1}, "^[ab]$")))
        ended = [output.outputs[0].finish_reason for output in ask(llm, ["names: "] * 4, [scarce] * 4)]
    sizes = [
        len(json.loads(output.outputs[0].text, object_pairs_hook=names))
        for output in outputs
        if output.outputs[0].finish_reason == "stop"
    ]
    assert len(sizes) > 12 and max(sizes) >= 4 and {*ended} <= {"stop", "length"}


HOSTILE: dict[str, dict[str, Any]] = {  # the last two take minutes or gigabytes, the others the process
    "rules": {"grammar": "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(20_000)), 'r20000: "b"'])},
    "references": {
        "json": {
            "$ref": "#/$defs/0",
            "$defs": {
                "3000": {"type": "null"},
                **{str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"const": i}]} for i in range(3_000)},
            },
        }
    },
    "the least integer": {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "const": -9223372036854775808}'},
    "enum of 100,000": {"json": {"enum": [f"{i:x}" for i in range(100_000)]}},
    "10,000 deep": {"json": '{"type":"object","properties":{"a":' * 10_000 + "{}" + "}}" * 10_000},
    "without an end": {"json": {"$ref": "#"}},
    "left recursion": {"grammar": 'start: start start "a"'},
    "intersections": {"grammar": "start: A\nA: " + " & ".join(f"/[^a]*[a-z]{{{i}}}/" for i in range(300))},
    "a divisor": {"json": {"type": "integer", "multipleOf": 123_456_789}},
}


def test_hostile_grammars_fail_alone_while_a_neighbour_goes_on() -> None:
    """The neighbours, one of them with a schema of its own, are done before the slow ones are given up."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(choice=["fine"])),
    ]
    ended: list[str] = []

    async def run() -> tuple[dict[str, str], list[str]]:
        async with AsyncLLM(max_model_len=128, async_depth=2) as served:

            async def one(name: str, params: SamplingParams) -> str:
                text = ""
                try:
                    async for output in served.generate("The", params):
                        text = output.outputs[0].text
                except RequestFailed as failure:
                    text = f"{failure.code}: {failure}"
                ended.append(name)
                return text

            alone = [await one("alone", each) for each in params]
            hostile = {
                name: SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(**structured))
                for name, structured in HOSTILE.items()
            }
            tasks = {name: asyncio.create_task(one(name, each)) for name, each in hostile.items()}
            beside = await asyncio.gather(*(one("beside", each) for each in params))
            found = {name: await task for name, task in tasks.items()}
            assert beside == alone == [await one("after", each) for each in params]
            served.engine.core.check()
            return found, alone

    before = set(threading.enumerate())
    found, alone = asyncio.run(run())
    assert alone[1] == "fine" and len(alone[0]) > 60
    assert all(text.startswith("invalid_grammar: ") for text in found.values()), found
    last = len(ended) - 1 - ended[::-1].index("beside")
    assert last < ended.index("intersections") and last < ended.index("a divisor"), ended
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left), left

"""The routes over the bundled model: the answers are those of the model, however they are asked for."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.contracts.sampling import SamplingParams
from quire.entry.llm import LLM

PROMPTS = ["def add(a, b):\n", "The capital of France is", "naïve café 🙂"]


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str, list[int]]]:
    """(prompt ids, greedy text, greedy ids) of `LLM.generate`."""
    with LLM(num_threads=1, use_tqdm_on_load=False, dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].text, o.outputs[0].token_ids) for o in outputs]


def test_greedy_text_is_that_of_the_offline_class(
    tiny_engine: Any, make_client: Callable[..., Any], expected: list[tuple[list[int], str, list[int]]]
) -> None:
    client, body = make_client(tiny_engine), {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    for prompt in (PROMPTS, [ids for ids, _, _ in expected]):
        choices = asyncio.run(client.post("/v1/completions", body | {"prompt": prompt})).json["choices"]
        got = [(c["prompt_token_ids"], c["text"], c["token_ids"]) for c in choices]
        assert got == expected
        events = asyncio.run(client.post("/v1/completions", body | {"prompt": prompt, "stream": True})).events
        for index, (_, text, _) in enumerate(expected):
            pieces = [c["text"] for e in events for c in e["choices"] if c["index"] == index]
            assert "".join(pieces) == text


def test_an_evaluation_harness_finds_greedy_text_greedy(
    tiny_engine: Any, make_client: Callable[..., Any], expected: list[tuple[list[int], str, list[int]]]
) -> None:
    """Scoring the greedy continuation by echo must find every token of it the likeliest, bit for bit."""
    client = make_client(tiny_engine)
    for ids, _, continuation in expected:
        body = {"prompt": [ids + continuation], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        logprobs = asyncio.run(client.post("/v1/completions", body)).json["choices"][0]["logprobs"]
        own, top = logprobs["token_logprobs"][len(ids) : -1], logprobs["top_logprobs"][len(ids) : -1]
        assert len(own) == len(continuation)
        assert all(number == max(others.values()) for number, others in zip(own, top, strict=True))
        wrong = {**body, "prompt": [[*ids, (continuation[0] + 1) % 1000, *continuation]]}
        logprobs = asyncio.run(client.post("/v1/completions", wrong)).json["choices"][0]["logprobs"]
        at = len(ids)
        assert logprobs["token_logprobs"][at] < max(logprobs["top_logprobs"][at].values())


def test_a_chat(tiny_engine: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(tiny_engine)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "seed": 1, "logprobs": True}
    choice = asyncio.run(client.post("/v1/chat/completions", body)).json["choices"][0]
    events = asyncio.run(client.post("/v1/chat/completions", body | {"stream": True})).events
    deltas = [c["delta"].get("content", "") for e in events for c in e["choices"]]
    assert "".join(deltas) == choice["message"]["content"]
    entries = [x for e in events for c in e["choices"] for x in (c["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]


def test_forced_calls_and_forms_come_out(tiny_engine: Any, make_client: Callable[..., Any]) -> None:
    city = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": city}} for name in ("weather", "time")]
    client = make_client(tiny_engine)
    body = {"messages": [{"role": "user", "content": "The weather in Rome?"}], "temperature": 0, "max_tokens": 64}
    for choice, finish in (("required", "tool_calls"), ({"type": "function", "function": {"name": "time"}}, "stop")):
        asked = body | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        (answer,) = asyncio.run(client.post("/v1/chat/completions", asked)).json["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert answer["finish_reason"] == finish and call["function"]["name"] in ("weather", "time")[finish == "stop" :]
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": city}}}
    text = asyncio.run(client.post("/v1/chat/completions", body | structured)).json["choices"][0]["message"]["content"]
    assert json.loads(text)["city"] in ("Rome", "Oslo")


def test_several_greedy_completions_are_equal(
    tiny_engine: Any, make_client: Callable[..., Any], expected: list[tuple[list[int], str, list[int]]]
) -> None:
    body = {"temperature": 0, "max_tokens": 12, "n": 2, "prompt": PROMPTS[:1]}
    choices = asyncio.run(make_client(tiny_engine).post("/v1/completions", body)).json["choices"]
    assert [choice["text"] for choice in choices] == [expected[0][1]] * 2

"""Clients and tools that people point at a server, each in an environment of its own (scripts/clients makes them).

They run in the long products only. Every program in the folder clients compares with what `LLM` says.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams

from ..support.full import only_full
from .serving import MOCK, running_server
from .test_clients import FLAGS, KEY, PROMPTS, QUESTIONS

CLIENTS = Path(__file__).with_name("clients")
NAMES = sorted(path.name.partition(".")[0] for path in CLIENTS.glob("*.txt") if ".hashes." not in path.name)
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
PIN = re.compile(r"^([\w-]+)(?:\[[\w,]+\])?==(\S+)", re.MULTILINE)
PATIENCE = 600.0  # seconds: some of them take long to import, and some generate what they ask
KEYED = (
    "--api-key",
    KEY,
    "--max-model-len",
    "128",
    "--pooler-config",
    '{"pooling_type": "MEAN"}',
    "--trust-request-chat-template",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TRIP = {
    "type": "object",
    "properties": {"town": {"enum": ["Faro", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
SCORED = ((PROMPTS[3], " France is Paris."), (PROMPTS[1], ", the function returns"), ("import", " os"))


def said(llm: LLM, *messages: dict[str, Any], params: SamplingParams = GREEDY, **options: Any) -> str:
    """Return the model's answer to a conversation."""
    return llm.chat(list(messages), params, use_tqdm=False, **options)[0].outputs[0].text


def asked(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def call(llm: LLM) -> dict[str, Any]:
    """A call that the model makes because it was asked something, and what it says to the result."""
    question, result = asked("What is the weather in Paris?"), json.dumps({"temperature": 21})
    text = said(llm, question, tools=[WEATHER])
    made = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": made}]}
    answer = said(llm, question, turn, {"role": "tool", "content": result}, tools=[WEATHER])
    return {"question": question["content"], "tools": [WEATHER], "result": result, "answer": answer, **made}


def score(llm: LLM, context: str, continuation: str) -> tuple[str, str, float, bool]:
    """Return the log-probability of a continuation, and True if greedy decoding writes it."""
    encode = llm.get_tokenizer().encode
    start, ids = len(encode(context)), encode(context + continuation)
    rows = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[0].prompt_logprobs
    assert rows is not None
    own = [rows[at][ids[at]] for at in range(start, len(ids))]  # type: ignore[index]
    return context, continuation, sum(one.logprob for one in own), all(one.rank == 1 for one in own)


def right_answers(llm: LLM) -> dict[str, Any]:
    """Return the answers for the programs."""
    texts = llm.generate(list(PROMPTS), GREEDY.clone(max_tokens=24), use_tqdm=False)
    greedy_trip = GREEDY.clone(structured_outputs=StructuredOutputsParams(json=TRIP))
    thinks = said(
        llm,
        asked("Think about Faro."),
        params=GREEDY.clone(skip_special_tokens=False),
        chat_template_kwargs={"enable_thinking": True},
    )
    reasoning, _, answer = thinks.removesuffix("<|im_end|>").partition("</think>")
    return {
        "chats": {question: said(llm, asked(question)) for question in QUESTIONS},
        "texts": {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, texts, strict=True)},
        "embeddings": {one.prompt: one.outputs.embedding for one in llm.embed(list(PROMPTS), use_tqdm=False)},
        "call": call(llm),
        "structured": {
            "question": "Faro?",
            "schema": TRIP,
            "value": json.loads(said(llm, asked("Faro?"), params=greedy_trip)),
        },
        "thought": {"question": "Think about Faro.", "reasoning": reasoning.strip(), "answer": answer.strip()},
        "scores": [score(llm, *pair) for pair in SCORED],
    }


@pytest.fixture(scope="module")
def facts_file(talker_model: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two running servers, and a file that says where they are and what is right."""
    right = right_answers(talker_model)
    with (
        running_server(*FLAGS, "--reasoning-parser", "qwen3") as server,
        running_server(*MOCK, *KEYED, wait="/ready") as keyed,
    ):
        path = tmp_path_factory.mktemp("clients") / "facts.json"
        path.write_text(json.dumps(right | {"url": server.url, "keyed_url": keyed.url, "key": KEY}))
        yield path
        assert "Traceback" not in server.stderr + keyed.stderr


@only_full
@pytest.mark.parametrize("name", NAMES)
def test_every_scenario(facts_file: Path, name: str) -> None:
    folder = Path(sys.prefix, "clients", name)
    if not (folder / ".made").is_file():
        pytest.skip(f"the environment {folder} is not there; scripts/clients {name} makes it")
    foreign = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    program = CLIENTS / f"run_{name}.py"
    run = subprocess.run(
        [str(folder / "bin" / "python"), str(program), str(facts_file)],
        env=environment,
        text=True,
        cwd=facts_file.parent,
        capture_output=True,
        timeout=PATIENCE,
    )
    version, *done = run.stdout.splitlines() or ["nothing"]
    assert run.returncode == 0, f"{version}, after {done}:\n{run.stdout[-3000:]}\n{run.stderr[-6000:]}"
    pins, scenarios = PIN.findall((CLIENTS / f"{name}.txt").read_text()), program.read_text()
    assert version == " ".join(pins[0])
    assert [line for line in done if line] == re.findall(
        r"^def (\w+)\(facts: Facts\) -> None:", scenarios, re.MULTILINE
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_page_tells_what_is_pinned(name: str) -> None:
    pins = PIN.findall((CLIENTS / f"{name}.txt").read_text())
    assert pins and all(f"{package} {version}" in PAGE.read_text() for package, version in pins)

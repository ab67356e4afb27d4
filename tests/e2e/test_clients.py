"""The `openai` package against `quire serve`, in both major versions: every answer is what `LLM.generate` says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

from .scenarios import OPENAI, run_scenarios
from .serving import MOCK, running_server

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "1024", "--kv-cache-memory-bytes", "48M")
KEY = "sk-test"
PROMPTS = ("The little dog went to the", "Once upon a time", "def main():\n", "The capital of")
QUESTIONS = ("What is bytearray.decode?", "Which module provides OrderedDict?")
DRAWN = {"prompt": PROMPTS[1], "seed": 7}


def right_answers(llm: LLM, base: SamplingParams) -> dict[str, Any]:
    """Return the answers for the scenario; `base`: the model's own defaults, which the server uses, too."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    texts = llm.generate(list(PROMPTS), greedy, use_tqdm=False)
    chats = [
        llm.chat([{"role": "user", "content": q}], SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)[0]
        for q in QUESTIONS
    ]
    (scored,) = llm.generate([PROMPTS[0]], greedy.clone(logprobs=0, prompt_logprobs=0), use_tqdm=False)
    (drawn,) = llm.generate(
        [DRAWN["prompt"]], base.clone(temperature=1.0, n=2, max_tokens=16, seed=DRAWN["seed"]), use_tqdm=False
    )
    answer, before = scored.outputs[0], scored.prompt_logprobs
    assert answer.logprobs is not None and before is not None
    return {
        "texts": {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, texts, strict=True)},
        "chats": {question: output.outputs[0].text for question, output in zip(QUESTIONS, chats, strict=True)},
        "numbers": {
            "prompt": PROMPTS[0],
            "answer": [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)],
            "echo": [row[token].logprob for token, row in zip(scored.prompt_token_ids[1:], before[1:], strict=True)],
        },
        "embeddings": {one.prompt: one.outputs.embedding for one in llm.embed(list(PROMPTS), use_tqdm=False)},
        "drawn": DRAWN | {"texts": [completion.text for completion in drawn.outputs]},
    }


@pytest.fixture(scope="module")
def facts_file(talker_model: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two running servers, and a file that says where they are and what is right."""
    right = right_answers(talker_model, talker_model.get_default_sampling_params())
    with running_server(*FLAGS) as server, running_server(*MOCK, "--api-key", KEY, wait="/ready") as keyed:
        path = tmp_path_factory.mktemp("openai") / "facts.json"
        path.write_text(json.dumps(right | {"url": server.url, "keyed_url": keyed.url, "key": KEY}))
        yield path
        assert "Traceback" not in server.stderr + keyed.stderr


@pytest.mark.parametrize("version", OPENAI)
def test_every_scenario_with_a_major_version_of_the_client(facts_file: Path, version: str) -> None:
    run_scenarios("openai_scenario.py", facts_file, version, OPENAI[version])

"""The `anthropic` package against `quire serve`: every answer is what `LLM.chat` says."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

from .scenarios import ANTHROPIC, run_scenarios
from .serving import MOCK, running_server
from .test_clients import FLAGS, KEY, QUESTIONS


@pytest.fixture(scope="module")
def facts_file(talker_model: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two running servers, and a file that says where they are and what is right."""
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    chats = [
        talker_model.chat([{"role": "user", "content": question}], greedy, use_tqdm=False)[0].outputs[0].text
        for question in QUESTIONS
    ]
    beginning = chats[0][: len(chats[0]) // 2].rstrip()
    rest = (
        talker_model.chat(
            [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": beginning}],
            greedy,
            use_tqdm=False,
            add_generation_prompt=False,
            continue_final_message=True,
        )[0]
        .outputs[0]
        .text
    )
    with (
        running_server(*FLAGS, "--reasoning-parser", "qwen3") as server,
        running_server(*MOCK, "--api-key", KEY, wait="/ready") as keyed,
    ):
        path = tmp_path_factory.mktemp("anthropic") / "facts.json"
        path.write_text(
            json.dumps(
                {
                    "url": server.url,
                    "keyed_url": keyed.url,
                    "key": KEY,
                    "chats": dict(zip(QUESTIONS, chats, strict=True)),
                    "continued": [QUESTIONS[0], beginning, rest],
                }
            )
        )
        yield path
        assert "Traceback" not in server.stderr + keyed.stderr


def test_every_scenario(facts_file: Path) -> None:
    run_scenarios("anthropic_scenario.py", facts_file, "anthropic ", ANTHROPIC)

"""The evaluation harness lm-eval, from its recorded requests: what it reads from the answers is right to the last bit.

lm_eval_requests.json holds what lm-eval 0.4.13 sent for `--model local-completions` and `local-chat-completions` with
the bundled model in float32, byte for byte; `scores` are, per prompt, (tokens of the context, the log-probability it
computed, whether it took the choice for the greedy one), `texts` what it was given to continue. The harness itself:

    lm_eval run --model local-completions --tasks TASK
        --model_args model=quire-tiny,base_url=http://127.0.0.1:8000/v1/completions,max_length=4096
"""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

from .serving import PATIENCE, Server, running_server
from .test_clients import FLAGS

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("lm_eval_requests.json").read_text())
SCORED = [recorded for recorded in RECORDED if "scores" in recorded]
CONTINUED = [recorded for recorded in RECORDED if "texts" in recorded]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*FLAGS) as server:
        yield server
        assert "Traceback" not in server.stderr


def replay(server: Server, recorded: dict[str, Any]) -> Any:
    """Send the recorded bytes with the recorded headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        body = recorded["body"].encode() if "body" in recorded else None
        connection.request(recorded["method"], recorded["path"], body, recorded["headers"])
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return json.loads(answer)
    finally:
        connection.close()


def read_score(columns: dict[str, list[Any]], context: int) -> tuple[float, bool]:
    """As the harness reads one choice: the generated token left out, greedy where the token's number is the largest."""
    own, top = columns["token_logprobs"][context:-1], columns["top_logprobs"][context:-1]
    return sum(own), all(number == max(row.values()) for number, row in zip(own, top, strict=True))


def directly(llm: LLM, ids: list[int], context: int) -> tuple[float, bool]:
    """The same from the engine's own prompt log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    rows = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    assert rows is not None
    own = [rows[at][ids[at]] for at in range(context, len(ids))]  # type: ignore[index]
    return sum(entry.logprob for entry in own), all(entry.rank == 1 for entry in own)


@pytest.mark.parametrize("recorded", SCORED, ids=lambda recorded: recorded["name"])
def test_scores(server: Server, talker: LLM, recorded: dict[str, Any]) -> None:
    asked, answer = json.loads(recorded["body"]), replay(server, recorded)
    assert (asked["echo"], asked["logprobs"], asked["max_tokens"]) == (True, 1, 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(asked["prompt"])))
    for ids, choice, (context, score, greedy) in zip(
        asked["prompt"], answer["choices"], recorded["scores"], strict=True
    ):
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(ids) + 1}
        assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
        rows = list(zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True))[1:]
        assert all(top[token] == own for token, own, top in rows)  # the token is there, and its number the same float
        assert [len(top) - (own != max(top.values())) for _, own, top in rows] == [1] * len(rows)
        found = read_score(columns, context)
        assert found[0] == pytest.approx(score, rel=1e-4, abs=1e-6) and greedy in (None, found[1])
        right = directly(talker, ids, context)
        assert found[0] == pytest.approx(right[0], rel=1e-5, abs=1e-6) and found[1] == right[1]


def test_a_cached_prompt_scores_the_same(server: Server) -> None:
    first, second = (replay(server, SCORED[0])["choices"][0]["logprobs"] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("recorded", CONTINUED, ids=lambda recorded: recorded["name"])
def test_continuations(server: Server, recorded: dict[str, Any]) -> None:
    choices = replay(server, recorded)["choices"]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    assert texts == recorded["texts"] and not any("\n" in text for text in texts)


def test_the_served_tokenizer_is_found_and_counts_right(server: Server, talker: LLM) -> None:
    info, probe, text = (replay(server, recorded) for recorded in RECORDED[:3])
    tokenizer = talker.get_tokenizer()
    assert info["eos_token"] and info["eos_token_id"] == tokenizer.eos_token_id and info["bos_token"] is None
    assert info["chat_template"] and info["pad_token_id"] == tokenizer.pad_token_id
    assert probe["tokens"] and probe["count"] == len(probe["tokens"])
    assert text["tokens"] == tokenizer.encode(json.loads(RECORDED[2]["body"])["prompt"])

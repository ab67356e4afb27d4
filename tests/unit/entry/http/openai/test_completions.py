"""/v1/completions over the mock core: prompts, choices, echo, logprobs, extensions, limits."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.config.serve import LogConfig
from quire.contracts.errors import EngineDead, QueueTimeout
from quire.contracts.request import NO_ACCOUNT
from quire.contracts.sampling import SamplingParams
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.request_scope import RequestScope
from quire.observe.log_lines import JsonFormatter
from quire.observe.metrics import Metrics
from quire.text import fill_in_middle

from .conftest import Reply

PATH = "/v1/completions"


@pytest.fixture
def ask(mock_engine: Any, make_client: Callable[..., Any]) -> Callable[..., Any]:
    client = make_client(mock_engine)

    def call(prompt: Any = "Hello world", **fields: Any) -> Any:
        return asyncio.run(client.post(PATH, {"prompt": prompt, "max_tokens": 4, **fields}))

    return call


@pytest.fixture
def last_params(mock_engine: Any) -> Callable[[], SamplingParams]:
    return lambda: mock_engine.seen[-1][1]


def test_one_text(ask: Callable[..., Any]) -> None:
    reply = ask()
    assert reply.status == 200 and reply.header("content-type") == "application/json"
    answer = reply.json
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["id"] == "cmpl-" + reply.header("x-request-id")
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert "token_ids" not in choice
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_sixteen_tokens_unless_asked_and_the_server_s_defaults(
    ask: Callable[..., Any], last_params: Callable[[], SamplingParams]
) -> None:
    assert ask(max_tokens=None).json["usage"]["completion_tokens"] == 16
    # As the bundled model's generation_config.json says.
    assert (last_params().temperature, last_params().top_p) == (0.7, 0.9)
    ask(temperature=0.25, top_p=0)
    assert last_params().temperature == 0.25 and 0.0 < last_params().top_p < 1e-6


@pytest.mark.parametrize(("prompt", "count"), [("a", 1), (["a", "b", "c"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2)])
def test_every_form_of_prompt(ask: Callable[..., Any], prompt: Any, count: int) -> None:
    choices = ask(prompt, n=2).json["choices"]
    assert [c["index"] for c in choices] == list(range(2 * count))


def test_choice_index_is_prompt_times_n_plus_number(ask: Callable[..., Any]) -> None:
    together = ask([[5, 6, 7], [9, 10]], n=2, seed=3, return_token_ids=True).json["choices"]
    alone = [ask([ids], n=2, seed=3, return_token_ids=True).json["choices"] for ids in ([5, 6, 7], [9, 10])]
    assert [c["prompt_token_ids"] for c in together] == [[5, 6, 7]] * 2 + [[9, 10]] * 2
    assert [c["text"] for c in together] == [c["text"] for group in alone for c in group]


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], [[1], 2], [[]], ""])
def test_prompts_that_are_none(ask: Callable[..., Any], prompt: Any) -> None:
    assert ask(prompt).status == 400
    assert ask(prompt).error["param"] == "prompt"


def test_choices_are_bounded_over_all_prompts(ask: Callable[..., Any]) -> None:
    assert ask([[5]] * 64, n=2, max_tokens=1).status == 200
    reply = ask([[5]] * 65, n=2, max_tokens=1)
    assert reply.status == 400 and "130 completions" in reply.error["message"] and reply.error["param"] == "n"
    reply = ask([[5]] * 1025, max_tokens=1)
    assert reply.status == 400 and "or 1024 with n=1" in reply.error["message"] and reply.error["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_data_set_is_one_request(ask: Callable[..., Any], stream: bool) -> None:
    reply = ask([[5, at % 7] for at in range(1024)], max_tokens=1, stream=stream)
    assert reply.status == 200, reply.body
    answers = reply.events if stream else [reply.json]
    choices = [choice for answer in answers for choice in answer["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in choices) == list(range(1024))


def test_a_prompt_that_does_not_fit_says_the_three_numbers(ask: Callable[..., Any]) -> None:
    longest = 4096
    reply = ask([[5] * 4000], max_tokens=200)
    error = reply.error
    assert reply.status == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens" and "lower max_tokens to 96" in error["message"]
    for words in (f"this model's maximum context length is {longest} tokens", "prompt is too long", " 4000", " 200"):
        assert words in error["message"]  # by the first litellm knows what it is, by the second langchain
    assert ask([[5] * longest], max_tokens=None).error["code"] == "context_length_exceeded"
    assert ask([[5] * longest], max_tokens=0, echo=True).status == 200
    assert ask([[5] * (longest - 1)], max_tokens=None).json["usage"]["completion_tokens"] == 1


def test_truncation(ask: Callable[..., Any]) -> None:
    ids = list(range(5, 25))
    left = ask([ids], truncate_prompt_tokens=3, return_token_ids=True)
    assert left.json["choices"][0]["prompt_token_ids"] == ids[-3:]
    right = ask([ids], truncate_prompt_tokens=3, truncation_side="right", return_token_ids=True)
    assert right.json["choices"][0]["prompt_token_ids"] == ids[:3]
    assert ask([[5] * 9000], truncate_prompt_tokens=-1, max_tokens=96).json["usage"]["prompt_tokens"] == 4000


def test_extensions_reach_the_engine(ask: Callable[..., Any], last_params: Callable[[], SamplingParams]) -> None:
    fields: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": 7,
        "stop": ["zzz"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [5, 6],
        "bad_words": ["bad"],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    assert ask(**fields, logit_bias={"5": -100}).status == 200
    params = last_params()
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {5: -100.0}


def test_salt_priority_and_timeout_reach_the_engine(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(mock_engine)

    async def call(**headers: str) -> Any:
        return await client.post(PATH, {"prompt": "a", "cache_salt": "s", "request_id": "mine"}, **headers)

    reply = asyncio.run(call(x_request_timeout="7.5"))
    prompts, _, options = mock_engine.seen[-1]
    assert prompts[0].cache_salt == "s"
    assert {name: options[name] for name in ("request_id", "priority", "timeout", "account")} == {
        "request_id": "mine",
        "priority": 0,
        "timeout": 7.5,
        "account": NO_ACCOUNT,
    }
    assert reply.json["id"] == "cmpl-mine" and reply.header("x-request-id") == "mine"
    assert asyncio.run(call(x_request_timeout="soon")).status == 400
    assert asyncio.run(call(x_request_timeout="-1")).status == 400


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_every_seed_of_64_bits(ask: Callable[..., Any], seed: int) -> None:
    assert ask(seed=seed).status == 200
    assert ask(seed=2**64).error["param"] == "seed"


def test_bad_values_that_only_the_engine_sees(ask: Callable[..., Any]) -> None:
    assert ask(stop=[""]).error["param"] == "stop"
    assert ask(min_tokens=9).error["param"] == "min_tokens"
    assert ask(logprobs=21).error["param"] == "logprobs"
    for ids in ([9000], [-1], [10**30], [[5], [9000]]):
        error = ask(ids).error
        assert error["param"] == "prompt" and error["message"].startswith("prompt holds ")
    assert ask(stop_token_ids=[10**6]).error["param"] == "stop_token_ids"
    assert ask([[10**6]]).status == 400
    assert ask([[-1]]).status == 400
    assert ask([[2**40]]).status == 400
    assert ask(priority=1).error["param"] == "priority"


# --- logprobs and echo ----------------------------------------------------------------------------------------------


def test_the_request_of_evaluation_harnesses(ask: Callable[..., Any]) -> None:
    """They send ids, drop the last entry and take a token for greedy when its number equals the largest one."""
    ids = [[5, 6, 7, 300, 400], [8, 9]]
    reply = ask(ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    for choice, prompt in zip(reply.json["choices"], ids, strict=True):
        logprobs = choice["logprobs"]
        assert all(len(column) == len(prompt) + 1 for column in logprobs.values())
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        columns = (logprobs[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
        for token, own, top in zip(*columns, strict=True):
            assert top[token] == own and isinstance(max(top.values()), float)


def test_echo_without_logprobs_and_without_tokens(ask: Callable[..., Any]) -> None:
    reply = ask("Hello world", echo=True, max_tokens=0)
    (choice,) = reply.json["choices"]
    assert choice["text"] == "Hello world" and choice["finish_reason"] == "length"
    assert reply.json["usage"]["completion_tokens"] == 0
    scored = ask("Hello world", echo=True, max_tokens=0, logprobs=2).json["choices"][0]["logprobs"]
    assert scored["tokens"] == ["Hello", " world"] and scored["text_offset"] == [0, 5]


def test_offsets_count_characters_of_the_echoed_text(ask: Callable[..., Any]) -> None:
    text = "naïve <|im_start|>café 🙂 x"
    (choice,) = ask(text, echo=True, logprobs=0, skip_special_tokens=False).json["choices"]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert choice["text"].startswith(text)
    ends = [*offsets[1:], len(choice["text"])]
    for token, start, end in zip(tokens, offsets, ends, strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][start:end] == token
    assert offsets == sorted(offsets)


def test_parts_of_characters_stay_apart(ask: Callable[..., Any]) -> None:
    (choice,) = ask("🙂", echo=True, logprobs=1, max_tokens=0).json["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) > 1 and len(set(tokens)) == len(tokens) and all(t.startswith("bytes:\\x") for t in tokens)
    assert choice["logprobs"]["text_offset"] == [0] * len(tokens)


def test_tokens_as_ids(ask: Callable[..., Any]) -> None:
    (choice,) = ask([[5, 6]], logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True).json["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_prompt_logprobs(ask: Callable[..., Any]) -> None:
    (choice,) = ask([[5, 6, 7]], prompt_logprobs=1).json["choices"]
    assert choice["prompt_logprobs"][0] is None and set(choice["prompt_logprobs"][1]) == {"6"}
    assert set(choice["prompt_logprobs"][1]["6"]) == {"logprob", "rank", "decoded_token"}
    assert choice["logprobs"] is None


# --- names, headers -------------------------------------------------------------------------------------------------


def test_models(ask: Callable[..., Any]) -> None:
    assert ask(model="alias").json["model"] == "alias"
    assert ask(model="").json["model"] == "tiny"
    reply = ask(model="gpt-5")
    assert reply.status == 404 and reply.error["code"] == "model_not_found" and reply.error["param"] == "model"
    assert "tiny" in reply.error["message"] and "alias" in reply.error["message"]


def test_unknown_fields_are_told_and_logged_once(ask: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        reply = ask(guided_jsn={"a": 1}, metadata={"x": "y"})
        assert reply.status == 200 and reply.all("x-quire-warning") == ["unknown field 'guided_jsn'"]
    assert [r.getMessage() for r in caplog.records if "guided_jsn" in r.getMessage()] != []
    assert len([r for r in caplog.records if "guided_jsn" in r.getMessage()]) == 1


def test_the_grammar_backend_of_another_engine_is_told(ask: Callable[..., Any]) -> None:
    told = ["unknown field 'guided_decoding_backend' (llguidance makes every mask)"]
    assert ask(guided_decoding_backend="xgrammar").all("x-quire-warning") == told


def test_requests_are_logged_when_asked_and_without_their_text(
    mock_engine: Any, make_client: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire")
    body = {"prompt": "Hello world", "max_tokens": 3, "request_id": "r1"}
    asyncio.run(make_client(mock_engine).post(PATH, body))
    assert caplog.text == ""
    asyncio.run(make_client(mock_engine, enable_log_requests=True).post(PATH, body))
    assert "request r1: 2 prompt tokens, 3 generated, length" in caplog.text and "Hello" not in caplog.text


def test_the_line_of_an_aborted_request_has_the_cause(
    mock_engine: Any, make_client: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire")

    async def work() -> None:
        client = make_client(mock_engine, enable_log_requests=True)
        asked = asyncio.create_task(client.post(PATH, {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True}))
        while not mock_engine._open:
            await asyncio.sleep(0)
        ((stream, _, _),) = mock_engine._open.values()
        stream.cause = "queue_timeout"
        stream.put(QueueTimeout("planted."))
        await asked

    asyncio.run(work())
    assert "aborted (queue_timeout)" in caplog.text
    (record,) = (each for each in caplog.records if hasattr(each, "fields"))
    line = json.loads(JsonFormatter("http").format(record))
    assert (line["finish"], line["cause"], line["prompt_tokens"]) == ("aborted", "queue_timeout", 1)
    assert line["request_id"] in line["message"] and line["generated_tokens"] >= 0


def test_the_access_line_of_a_stream_that_fails_says_so(
    mock_engine: Any, make_client: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is 200, since its first event was sent."""

    async def work(log: LogConfig) -> None:
        client, reply = make_client(mock_engine), Reply()
        client.app = RequestScope(client.app, metrics=Metrics(), access_log=AccessLog(log))
        body = json.dumps({"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
        asked = asyncio.create_task(client.call("POST", PATH, body, reply=reply))
        while not reply.parts:
            await asyncio.sleep(0)
        ((stream, _, _),) = mock_engine._open.values()
        stream.cause = "engine"
        stream.put(EngineDead("planted."))
        await asked

    asyncio.run(work(LogConfig(access_log=True)))
    assert " 200 " in (line := capsys.readouterr().err)
    assert line.endswith(" finish=aborted cause=engine error=engine_dead\n")
    asyncio.run(work(LogConfig(access_log=True, log_format="json")))
    line = json.loads(capsys.readouterr().err)
    assert (line["status"], line["finish"], line["cause"], line["error"]) == (200, "aborted", "engine", "engine_dead")


def test_request_ids(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(mock_engine)

    async def both() -> tuple[Any, Any, Any]:
        first = asyncio.create_task(client.post(PATH, {"prompt": "a", "max_tokens": 50}, x_request_id="twin"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = await client.post(PATH, {"prompt": "a"}, x_request_id="twin")
        return await first, second, await client.post(PATH, {"prompt": "a"}, x_request_id="twin")

    first, second, third = asyncio.run(both())
    assert first.status == 200 and first.header("x-request-id") == "twin"
    assert second.status == 409 and second.error["code"] == "duplicate_request_id"
    assert third.status == 200
    long = asyncio.run(client.post(PATH, {"prompt": "a"}, x_request_id="x" * 129))
    assert long.status == 200 and len(long.header("x-request-id") or "") <= 32
    assert asyncio.run(client.post(PATH, {"prompt": "a", "request_id": "a b"})).error["param"] == "request_id"


def test_one_request_id_behind_the_outermost_layer(mock_engine: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(mock_engine)
    client.app = RequestScope(client.app, metrics=Metrics())
    for fields, headers, expected in (
        ({"request_id": "body"}, {}, "body"),
        ({"request_id": "body"}, {"x_request_id": "head"}, "head"),
        ({}, {"x_request_id": "bad id\x01"}, None),
    ):
        reply = asyncio.run(client.post(PATH, {"prompt": "a", **fields}, **headers))
        (shown,) = reply.all("x-request-id")
        assert reply.json["id"] == f"cmpl-{shown}" and shown == (expected or shown)


def test_a_gap_is_filled_where_the_tokenizer_knows_gaps(
    ask: Callable[..., Any], mock_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("a", suffix="").status == 200
    error = ask("a", suffix="b").error
    assert error["param"] == "suffix" and "its tokenizer has no tokens for filling in the middle" in error["message"]
    monkeypatch.setattr(fill_in_middle, "GAPS", [fill_in_middle.Gap("x", "y", "z")])
    assert ask(["a", "b c"], suffix="\n").status == 200
    ids = [prompt.token_ids for prompt in mock_engine.seen[-1][0]]
    assert mock_engine.text.tokenizer.decode(ids[1], False) == "xb cy\nz" and len(ids) == 2
    for given, fields, words in (
        ([1, 2], {}, "prompt"),
        ("a", {"echo": True}, "echo"),
        ("a", {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ):
        error = ask(given, suffix="b", **fields).error
        assert error["param"] == "suffix" and words in error["message"]
    assert ask("a", suffix="b " * 5000).error["code"] == "context_length_exceeded"

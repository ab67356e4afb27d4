"""Requests of the `openai` package, as a program of its own: test_clients.py runs it with each major version.

    python openai_scenario.py FACTS.json

The file says where the servers are and what the right answers are: `url` and `keyed_url` with `key`; `texts`, by
prompt: 24 greedy tokens; `chats`, by question: greedy answers to their end; `numbers` of one prompt: log-probabilities
of prompt and answer; `embeddings`, by prompt; `drawn`: two seeded texts. Prints one line per scenario; the first wrong
answer ends it with a traceback.
"""

import asyncio
import json
import math
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic

MODEL = "quire-tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
NEARLY = 1e-4  # between log-probabilities that were computed in batches of different sizes


class Facts:
    """The servers and the right answers."""

    def __init__(self, path: str) -> None:
        facts = json.loads(Path(path).read_text())
        self.url, self.keyed_url, self.key = facts["url"], facts["keyed_url"], facts["key"]
        self.texts: dict[str, str] = facts["texts"]
        self.chats: dict[str, str] = facts["chats"]
        self.numbers: dict[str, Any] = facts["numbers"]
        self.drawn: dict[str, Any] = facts["drawn"]
        self.embeddings: dict[str, list[float]] = facts["embeddings"]
        self.prompt, self.question = next(iter(self.texts)), next(iter(self.chats))

    def client(self, **options: Any) -> openai.OpenAI:
        """A client of the server with a model, without retries."""
        return openai.OpenAI(**({"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0} | options))


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def refusal(kind: type[openai.APIStatusError], call: Callable[[], object]) -> Any:
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def close(found: Iterable[float | None], right: Iterable[float | None]) -> bool:
    """Return True if two columns of log-probabilities are the same up to rounding."""
    return all(
        a is b if a is None or b is None else math.isclose(a, b, abs_tol=NEARLY)
        for a, b in zip(found, right, strict=True)
    )


def models(facts: Facts) -> None:
    client = facts.client()
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model") == (client.models.retrieve(MODEL).id, "model")
    error = refusal(openai.NotFoundError, lambda: client.models.retrieve("gpt-5"))
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")


def vectors(facts: Facts) -> None:
    """The client asks for base64 by itself, and hands out numbers."""
    client, texts, right = facts.client(), list(facts.embeddings), list(facts.embeddings.values())
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=MODEL, input=texts, **options)
        assert all(close(one.embedding, found) for one, found in zip(answer.data, right, strict=True))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(texts)
    (short,) = client.embeddings.create(model=MODEL, input=texts[0], dimensions=16).data
    length = math.sqrt(sum(number**2 for number in right[0][:16]))
    assert close(short.embedding, [number / length for number in right[0][:16]])
    error = refusal(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="a", dimensions=4096))
    assert (error.code, error.param) == ("invalid_value", "dimensions")


def whole_answers(facts: Facts) -> None:
    client = facts.client()
    for prompt, text in facts.texts.items():
        answer = client.completions.create(prompt=prompt, max_tokens=24, **GREEDY)
        assert answer.choices[0].text == text and answer.model == MODEL and answer.id.startswith("cmpl-")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    for question, text in facts.chats.items():
        chat = client.chat.completions.create(messages=messages(question), max_completion_tokens=60, **GREEDY)
        assert chat.choices[0].message.content == text and chat.choices[0].message.role == "assistant"
        assert chat.choices[0].finish_reason == "stop" and chat.id.startswith("chatcmpl-")
    together = client.completions.create(prompt=list(facts.texts), max_tokens=24, **GREEDY)
    assert [choice.text for choice in together.choices] == list(facts.texts.values())
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": facts.question}]}]
    chat = client.chat.completions.create(messages=parts, max_tokens=60, **GREEDY)
    assert chat.choices[0].message.content == facts.chats[facts.question]


def streams(facts: Facts) -> None:
    client = facts.client()
    for prompt, text in facts.texts.items():
        events = list(client.completions.create(prompt=prompt, max_tokens=24, stream=True, **GREEDY))
        assert "".join(event.choices[0].text for event in events) == text
        assert [event.choices[0].finish_reason for event in events][-1] == "length"
        assert {event.usage for event in events} == {None}
    for question, text in facts.chats.items():
        events = list(
            client.chat.completions.create(
                messages=messages(question),
                max_tokens=60,
                stream=True,
                stream_options={"include_usage": True},
                **GREEDY,
            )
        )
        *pieces, last = events
        assert pieces[0].choices[0].delta.role == "assistant"
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
        assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].choices[0].finish_reason == "stop"
        assert last.choices == [] and 0 < last.usage.completion_tokens <= 60 and not any(p.usage for p in pieces)
    with client.chat.completions.stream(messages=messages(facts.question), max_tokens=60, **GREEDY) as told:
        kinds = {event.type for event in told}
        final = told.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.content == facts.chats[facts.question]


def several_choices(facts: Facts) -> None:
    client, drawn = facts.client(), facts.drawn
    asked = {
        "model": MODEL,
        "prompt": drawn["prompt"],
        "n": 2,
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": drawn["seed"],
    }
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == drawn["texts"] and drawn["texts"][0] != drawn["texts"][1]
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage.completion_tokens == 32
    texts = ["", ""]
    for event in client.completions.create(stream=True, **asked):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == drawn["texts"]
    chat = client.chat.completions.create(model=MODEL, messages=messages(facts.question), n=2, seed=5, max_tokens=8)
    again = client.chat.completions.create(model=MODEL, messages=messages(facts.question), n=2, seed=5, max_tokens=8)
    assert [c.message.content for c in chat.choices] == [c.message.content for c in again.choices]


def logprobs(facts: Facts) -> None:
    client, numbers = facts.client(), facts.numbers
    answer = client.completions.create(prompt=numbers["prompt"], max_tokens=24, logprobs=2, **GREEDY).choices[0]
    columns = answer.logprobs
    assert close(columns.token_logprobs, numbers["answer"]) and "".join(columns.tokens) == answer.text
    assert columns.text_offset == [len("".join(columns.tokens[:i])) for i in range(24)]
    for token, own, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        assert top[token] == own == max(top.values()) and len(top) == 2
    echoed = client.completions.create(prompt=numbers["prompt"], max_tokens=0, echo=True, logprobs=1, **GREEDY)
    columns = echoed.choices[0].logprobs
    assert echoed.choices[0].text == numbers["prompt"] and echoed.usage.completion_tokens == 0
    assert columns.token_logprobs[0] is None and close(columns.token_logprobs, [None, *numbers["echo"]])
    both = client.completions.create(prompt=numbers["prompt"], max_tokens=24, echo=True, logprobs=1, **GREEDY)
    assert both.choices[0].text == numbers["prompt"] + answer.text
    assert close(both.choices[0].logprobs.token_logprobs, [None, *numbers["echo"], *numbers["answer"]])
    chat = client.chat.completions.create(
        messages=messages(facts.question), max_tokens=60, logprobs=True, top_logprobs=3, **GREEDY
    ).choices[0]
    content = chat.logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in content)
    assert spelled.decode().startswith(chat.message.content)
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    streamed = client.chat.completions.create(
        messages=messages(facts.question), max_tokens=60, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    pieces = [entry for event in streamed for c in event.choices if c.logprobs for entry in c.logprobs.content]
    assert [entry.token for entry in pieces] == [entry.token for entry in content]
    assert close([entry.logprob for entry in pieces], [entry.logprob for entry in content])


def stops_and_echo(facts: Facts) -> None:
    client, text = facts.client(), facts.texts[facts.prompt]
    word = text.split()[2]
    before = text[: text.index(word)]
    for stop in (word, [word, "\x00"]):
        choice = client.completions.create(prompt=facts.prompt, stop=stop, max_tokens=24, **GREEDY).choices[0]
        assert (choice.text, choice.finish_reason) == (before, "stop")
        events = client.completions.create(prompt=facts.prompt, stop=stop, max_tokens=24, stream=True, **GREEDY)
        assert "".join(event.choices[0].text for event in events) == before
    echoed = client.completions.create(prompt=facts.prompt, echo=True, max_tokens=24, **GREEDY)
    assert echoed.choices[0].text == facts.prompt + text
    nothing = client.completions.create(prompt=facts.prompt, echo=True, max_tokens=0, **GREEDY)
    assert nothing.choices[0].text == facts.prompt and nothing.usage.completion_tokens == 0


def errors(facts: Facts) -> None:
    client = facts.client()

    def ask(**fields: Any) -> object:
        return client.completions.create(**(GREEDY | {"prompt": "Once", "max_tokens": 2} | fields))

    error = refusal(openai.NotFoundError, lambda: ask(model="gpt-5"))
    assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
    for field, value in (("temperature", 3), ("n", 0), ("top_p", "high"), ("prompt", []), ("logit_bias", {"x": 1})):
        error = refusal(openai.BadRequestError, lambda field=field, value=value: ask(**{field: value}))
        assert (error.status_code, error.param, error.type) == (400, field, "invalid_request_error"), field
        assert (
            error.request_id
            and field in error.body["message"]
            and error.body.keys() == {"message", "type", "param", "code"}
        )
    error = refusal(openai.BadRequestError, lambda: ask(prompt="word " * 3000))
    assert error.code == "context_length_exceeded"
    error = refusal(
        openai.BadRequestError,
        lambda: client.chat.completions.create(messages=messages("Hi"), modalities=["text", "audio"], **GREEDY),
    )
    assert (error.param, error.code) == ("modalities", "unsupported_parameter")
    error = refusal(
        openai.BadRequestError,
        lambda: client.chat.completions.create(
            messages=messages("Hi"),
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}},
            **GREEDY,
        ),
    )
    assert error.code == "invalid_grammar" and "strange" in error.body["message"]
    error = refusal(
        openai.BadRequestError,
        lambda: client.chat.completions.create(messages=[{"role": "pirate", "content": "Hi"}], **GREEDY),
    )  # type: ignore[typeddict-item]
    assert error.param == "messages"
    other = facts.client(base_url=facts.keyed_url + "/v1")
    error = refusal(openai.AuthenticationError, lambda: other.models.list())
    assert (error.status_code, error.code, error.type) == (401, "invalid_api_key", "authentication_error")
    known = facts.client(base_url=facts.keyed_url + "/v1", api_key=facts.key)
    assert known.models.list().data and known.completions.create(prompt="Once", max_tokens=3, model=MODEL).choices


class Ball(pydantic.BaseModel):
    """A schema whose texts all end: a model that was not trained for it would write numbers without an end."""

    colour: Literal["red", "green", "blue"]
    round: bool
    sizes: Annotated[list[Literal[1, 2, 3]], pydantic.Field(max_length=3)]


class Forecast(pydantic.BaseModel):
    """Weather of a day."""

    place: Literal["Oslo", "Rome"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


def structured_outputs(facts: Facts) -> None:
    """The client turns classes into schemas, and answers into their objects."""
    client = facts.client()
    for question in facts.chats:
        asked: Any = {"messages": messages(question), "max_tokens": 200, "response_format": Ball, **GREEDY}
        answer = client.chat.completions.parse(**asked)
        assert isinstance(answer.choices[0].message.parsed, Ball) and answer.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(**asked) as stream:
            assert [e for e in stream if e.type == "content.done"][0].parsed == answer.choices[0].message.parsed
    said = client.chat.completions.create(messages=messages(facts.question), max_tokens=200, **GREEDY)
    assert not said.choices[0].message.content.startswith("{")


def tools(facts: Facts) -> None:
    """Calls that are asked for come, streamed or not, and their results go back."""
    client, tool = facts.client(), openai.pydantic_function_tool(Forecast, name="forecast")
    named = {"type": "function", "function": {"name": "forecast"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        asked: Any = {
            "messages": messages(facts.question),
            "max_tokens": 200,
            "tools": [tool],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            **GREEDY,
        }
        answer = client.chat.completions.parse(**asked).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name == "forecast" and isinstance(call.function.parsed_arguments, Forecast)
        assert answer.finish_reason == reason and answer.message.content is None
        with client.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments and streamed.id
    turns = [
        *messages(facts.question),
        answer.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    asked |= {"messages": turns, "tool_choice": "none", "max_tokens": 8}
    assert client.chat.completions.create(**asked).choices[0].message.tool_calls is None


def ids_and_raw_answers(facts: Facts) -> None:
    client = facts.client()
    named = {"extra_headers": {"X-Request-Id": "mine-1"}}
    answer = client.completions.create(prompt="Once", max_tokens=2, **named, **GREEDY)
    assert (answer._request_id, answer.id) == ("mine-1", "cmpl-mine-1")
    drawn = {client.completions.create(prompt="Once", max_tokens=2, **GREEDY)._request_id for _ in range(3)}
    assert len(drawn) == 3 and None not in drawn
    error = refusal(
        openai.BadRequestError, lambda: client.completions.create(prompt="Once", max_tokens=-1, **named, **GREEDY)
    )
    assert error.request_id == "mine-1" and error.param == "max_tokens"
    raw = client.chat.completions.with_raw_response.create(messages=messages(facts.question), max_tokens=60, **GREEDY)
    assert raw.headers["content-type"] == "application/json" and raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == facts.chats[facts.question]
    with client.completions.with_streaming_response.create(
        prompt="Once", max_tokens=4, stream=True, **GREEDY
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def extensions(facts: Facts) -> None:
    client, text = facts.client(), facts.texts[facts.prompt]

    def ask(**extra: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=facts.prompt, max_tokens=24, temperature=1.0, extra_body=extra
        ).choices[0]

    assert ask(top_k=1).text == ask(min_p=1.0).text == text
    ids = ask(top_k=1, return_token_ids=True).token_ids
    assert len(ids) == 24 and ask(top_k=1, stop_token_ids=[ids[3]], return_token_ids=True).token_ids == ids[:4]
    assert set(ask(allowed_token_ids=ids[:2], return_token_ids=True).token_ids) <= set(ids[:2])
    asked: dict[str, Any] = GREEDY | {"messages": messages(facts.question)}
    short = client.chat.completions.create(max_tokens=60, **asked)
    long = client.chat.completions.create(max_tokens=60, extra_body={"ignore_eos": True}, **asked)
    assert short.usage.completion_tokens < 60 == long.usage.completion_tokens
    least = client.chat.completions.create(max_tokens=60, extra_body={"min_tokens": 40}, **asked)
    assert 40 <= least.usage.completion_tokens <= 60
    penalized = ask(top_k=1, repetition_penalty=1.5).text
    assert penalized != text
    raw = client.completions.with_raw_response.create(
        prompt="Once", max_tokens=2, extra_body={"frobnicate": 1}, **GREEDY
    )
    assert "frobnicate" in raw.headers["x-quire-warning"]


def metric(facts: Facts, name: str) -> float:
    with urllib.request.urlopen(facts.url + "/metrics") as scrape:
        lines = scrape.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == f"quire:{name}")


def many_at_once(facts: Facts) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=facts.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(prompt=prompt, max_tokens=24, stream=True, **GREEDY)
                return "".join([event.choices[0].text async for event in stream])

            prompts = [prompt for prompt in facts.texts for _ in range(8 // len(facts.texts))]
            assert len(prompts) == 8
            assert await asyncio.gather(*map(one, prompts)) == [facts.texts[prompt] for prompt in prompts]

    asyncio.run(run())


def leaving_early(facts: Facts) -> None:
    client = facts.client()
    aborted = metric(facts, "request_aborts_total")
    stream = client.completions.create(
        prompt=facts.prompt, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert [next(iter(stream)).choices[0].finish_reason for _ in range(3)] == [None] * 3
    stream.close()
    deadline = time.monotonic() + 30
    while metric(facts, "num_requests_running") or metric(facts, "request_aborts_total") == aborted:
        assert time.monotonic() < deadline, "the request of a closed stream still runs"
        client.completions.create(prompt="Once", max_tokens=1, **GREEDY)  # its step brings the numbers up to date
    assert metric(facts, "request_aborts_total") == aborted + 1


SCENARIOS = (
    models,
    vectors,
    whole_answers,
    streams,
    several_choices,
    logprobs,
    stops_and_echo,
    errors,
    structured_outputs,
    tools,
    ids_and_raw_answers,
    extensions,
    many_at_once,
    leaving_early,
)


def main(path: str) -> None:
    """Everything, in order."""
    facts = Facts(path)
    print(f"openai {openai.__version__}")
    for scenario in SCENARIOS:
        scenario(facts)
        print(scenario.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

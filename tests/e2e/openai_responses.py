"""Requests of the `openai` package to the Responses API, as a program of its own: test_responses.py runs it with
each major version.

    python openai_responses.py FACTS.json

The file says where the server is (`url`), and two of its keys (`keys`). Prints one line per scenario; the first wrong
answer ends it with a traceback.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

MODEL = "quire-tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
QUESTION = "What is bytearray.decode?"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


class Step(BaseModel):
    """Structured output."""

    kind: Literal["yes", "no"]
    count: Literal[1, 2, 3]


class Facts:
    """The server and a client of it."""

    def __init__(self, path: str) -> None:
        facts = json.loads(Path(path).read_text())
        self.url, self.keys = facts["url"] + "/v1", facts["keys"]
        self.client = self.client_of(self.keys[0])

    def client_of(self, key: str) -> openai.OpenAI:
        """A client with one of the keys, without retries."""
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)


def refusal(kind: type[openai.APIStatusError], call: Callable[[], object]) -> Any:
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def whole_answers(facts: Facts) -> None:
    raw = facts.client.responses.with_raw_response.create(input=QUESTION, max_output_tokens=60, **GREEDY)
    answer = Response.model_validate(json.loads(raw.text if isinstance(raw.text, str) else raw.text()))
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = facts.client.chat.completions.create(messages=messages, max_tokens=60, **GREEDY)
    assert answer.output_text == chat.choices[0].message.content and answer.output_text
    assert answer.status == "completed" and answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert facts.client.responses.retrieve(answer.id).output_text == answer.output_text
    short = facts.client.responses.create(input=QUESTION, max_output_tokens=2, **GREEDY)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    facts.client.responses.delete(answer.id)
    refusal(openai.NotFoundError, lambda: facts.client.responses.retrieve(answer.id))


def streams(facts: Facts) -> None:
    whole = facts.client.responses.create(input=QUESTION, max_output_tokens=60, **GREEDY)
    events = list(facts.client.responses.create(input=QUESTION, max_output_tokens=60, stream=True, **GREEDY))
    for number, event in enumerate(events):
        EVENTS.validate_python(event.to_dict())
        assert event.sequence_number == number
    assert list(dict.fromkeys(event.type for event in events)) == ORDER
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    with facts.client.responses.stream(input=QUESTION, max_output_tokens=60, **GREEDY) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == text
    stored = facts.client.responses.retrieve(final.id)
    assert stored.output_text == text and stored.usage == final.usage
    cut = facts.client.responses.create(input=QUESTION, max_output_tokens=2, stream=True, **GREEDY)
    assert [event.type for event in cut][-1] == "response.incomplete"


def structured_outputs(facts: Facts) -> None:
    answer = facts.client.responses.parse(input="Is it so?", text_format=Step, max_output_tokens=60, **GREEDY)
    assert isinstance(answer.output_parsed, Step) and Step.model_validate_json(answer.output_text)
    with facts.client.responses.stream(input="Is it so?", text_format=Step, max_output_tokens=60, **GREEDY) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def tools(facts: Facts) -> None:
    asked: Any = {"tools": [WEATHER], "max_output_tokens": 100, **GREEDY}
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        first = facts.client.responses.create(input=question, tool_choice=choice, **asked)
        call = next(item for item in first.output if item.type == "function_call")
        assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Oslo")
        events = list(facts.client.responses.create(input=question, tool_choice=choice, stream=True, **asked))
        for event in events:
            EVENTS.validate_python(event.to_dict())
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == call.arguments
        assert [item.type for item in events[-1].response.output] == [item.type for item in first.output]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    stateful = facts.client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
    history = [*question, *(item.to_dict() for item in first.output), result]
    stateless = facts.client.responses.create(input=history, tool_choice="none", store=False, **asked)
    assert stateful.output_text == stateless.output_text
    assert stateful.usage.input_tokens == stateless.usage.input_tokens > first.usage.input_tokens
    error = refusal(openai.BadRequestError, lambda: facts.client.responses.create(input=[result], **asked))
    assert error.param == "input" and "previous_response_id" in error.message


def chains(facts: Facts) -> None:
    create = facts.client.responses.create
    first = create(input="Hello", instructions="Be brief.", max_output_tokens=8, **GREEDY)
    second = create(input=QUESTION, previous_response_id=first.id, max_output_tokens=8, **GREEDY)
    third = create(input="And then?", previous_response_id=second.id, max_output_tokens=8, **GREEDY)
    history: Any = []
    for said, response in (("Hello", first), (QUESTION, second)):
        history += [{"role": "user", "content": said}, *(item.to_dict() for item in response.output)]
    again = create(input=[*history, {"role": "user", "content": "And then?"}], max_output_tokens=8, **GREEDY)
    assert third.output_text == again.output_text and third.usage.input_tokens == again.usage.input_tokens
    references: Any = [{"type": "item_reference", "id": item["id"]} if "id" in item else item for item in history]
    referred = create(input=[*references, {"role": "user", "content": "And then?"}], max_output_tokens=8, **GREEDY)
    assert referred.output_text == third.output_text
    refusal(openai.NotFoundError, lambda: create(input="x", previous_response_id="resp_0", **GREEDY))


def background(facts: Facts) -> None:
    responses = facts.client.responses
    begun = responses.create(input=QUESTION, max_output_tokens=60, background=True, **GREEDY)
    assert begun.status in ("in_progress", "queued")
    deadline = time.monotonic() + 60
    while (done := responses.retrieve(begun.id)).status == "in_progress":
        assert time.monotonic() < deadline, done
        time.sleep(0.01)
    whole = responses.create(input=QUESTION, max_output_tokens=60, **GREEDY)
    assert done.status == "completed" and done.output_text == whole.output_text and done.usage.output_tokens > 2
    assert responses.cancel(done.id).status == "completed"
    endless = responses.create(input=QUESTION, background=True, extra_body={"ignore_eos": True}, **GREEDY)
    assert responses.cancel(endless.id).status == "cancelled" == responses.retrieve(endless.id).status
    error = refusal(openai.BadRequestError, lambda: responses.cancel(whole.id))
    assert "background" in error.message
    with responses.create(input=QUESTION, max_output_tokens=60, background=True, stream=True, **GREEDY) as stream:
        events: list[Any] = [next(stream) for _ in range(6)]
    name = events[0].response.id
    with responses.retrieve(name, stream=True, starting_after=events[-1].sequence_number) as stream:
        events += stream
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text == responses.retrieve(name).output_text


def errors(facts: Facts) -> None:
    def ask(**fields: Any) -> object:
        return facts.client.responses.create(**(GREEDY | {"input": "Once", "max_output_tokens": 2} | fields))

    error = refusal(openai.NotFoundError, lambda: facts.client.responses.retrieve("resp_unknown"))
    assert "resp_unknown" in error.message and error.request_id
    assert refusal(openai.NotFoundError, lambda: ask(model="gpt-5")).code == "model_not_found"
    for field, value in (
        ("temperature", 3),
        ("input", []),
        ("tools", [{"type": "web_search"}]),
        ("top_logprobs", 3),
        ("conversation", "conv_1"),
        ("metadata", {"k": 1}),
        ("include", ["file_search_call.results"]),
    ):
        error = refusal(openai.BadRequestError, lambda field=field, value=value: ask(**{field: value}))
        assert error.param == field and error.type == "invalid_request_error" and field in error.message, error
    error = refusal(openai.BadRequestError, lambda: ask(input="word " * 5000))
    assert error.code == "context_length_exceeded" and error.param == "input"


def keys(facts: Facts) -> None:
    made = facts.client.responses.create(input="Once", max_output_tokens=2, **GREEDY)
    other = facts.client_of(facts.keys[1]).responses
    refusal(openai.NotFoundError, lambda: other.retrieve(made.id))
    refusal(openai.NotFoundError, lambda: other.create(input="x", previous_response_id=made.id, **GREEDY))
    refusal(openai.AuthenticationError, lambda: facts.client_of("none").responses.retrieve(made.id))


SCENARIOS = (whole_answers, streams, structured_outputs, tools, chains, background, errors, keys)


def main(path: str) -> None:
    """Everything, in order."""
    facts = Facts(path)
    print(f"openai {openai.__version__}")
    for scenario in SCENARIOS:
        scenario(facts)
        print(scenario.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Requests of users of the `anthropic` package, as a program of its own: test_messages_client.py runs it.

    python anthropic_scenario.py FACTS.json

The file says where the servers are and what the right answers are: `url` and `keyed_url` with `key`; `chats`, by
question: greedy answers to their end; `continued`: [question, beginning, what follows]. Prints one line per scenario;
the first wrong answer ends it with a traceback.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic

MODEL = "quire-tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"enum": ["Faro", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["town", "days"],
        "additionalProperties": False,
    },
}


class Facts:
    """The servers and the right answers."""

    def __init__(self, path: str) -> None:
        facts = json.loads(Path(path).read_text())
        self.url, self.keyed_url, self.key = facts["url"], facts["keyed_url"], facts["key"]
        self.chats: dict[str, str] = facts["chats"]
        self.continued: list[str] = facts["continued"]
        self.question = next(iter(self.chats))

    def client(self, **options: Any) -> anthropic.Anthropic:
        """A client of the server with a model, without retries."""
        return anthropic.Anthropic(**({"base_url": self.url, "api_key": "none", "max_retries": 0} | options))


def asked(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def shown(message: Any) -> dict[str, Any]:
    """Return a message without the fields that differ for every request."""
    content = [block.model_dump(exclude={"id", "parsed_output"}, exclude_none=True) for block in message.content]
    return {
        "content": content,
        "stop": (message.stop_reason, message.stop_sequence),
        "tokens": message.usage.output_tokens,
    }


def refusal(kind: type[anthropic.APIStatusError], call: Callable[[], object]) -> Any:
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def whole_answers(facts: Facts) -> None:
    client = facts.client()
    for question, text in facts.chats.items():
        message = client.messages.create(messages=asked(question), **GREEDY)
        assert [block.type for block in message.content] == ["text"] and message.content[0].text == text
        assert (message.role, message.type, message.model, message.stop_reason) == (
            "assistant",
            "message",
            MODEL,
            "end_turn",
        )
        assert message.id == f"msg_{message._request_id}"
        counted = client.messages.count_tokens(model=MODEL, messages=asked(question))
        assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0


def streams(facts: Facts) -> None:
    client = facts.client()
    for question, text in facts.chats.items():
        whole = client.messages.create(messages=asked(question), **GREEDY)
        with client.messages.stream(messages=asked(question), **GREEDY) as stream:
            assert "".join(stream.text_stream) == text
            assert shown(stream.get_final_message()) == shown(whole)
        kinds = [event.type for event in client.messages.create(messages=asked(question), stream=True, **GREEDY)]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}


def how_it_ends(facts: Facts) -> None:
    client, text = facts.client(), facts.chats[facts.question]
    for word in (text[5:8], text[1:3]):
        stopped = client.messages.create(messages=asked(facts.question), stop_sequences=["\0", word], **GREEDY)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        assert stopped.content[0].text == text[: text.index(word)]
    short = client.messages.create(messages=asked(facts.question), **GREEDY | {"max_tokens": 3})
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3
    everything = client.messages.create(messages=asked(facts.question), **GREEDY | {"max_tokens": 10**6}, timeout=60)
    assert everything.stop_reason == "end_turn" and everything.content[0].text == text


def continues(facts: Facts) -> None:
    question, beginning, rest = facts.continued
    messages = [*asked(question), {"role": "assistant", "content": [{"type": "text", "text": beginning}]}]
    assert facts.client().messages.create(messages=messages, **GREEDY).content[0].text == rest


def calls(facts: Facts) -> None:
    client = facts.client()
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, **GREEDY}
        whole = client.messages.create(messages=asked("Faro?"), **fields)
        (call,) = whole.content
        assert whole.stop_reason == "tool_use" and (call.type, call.name) == ("tool_use", "weather")
        assert call.input["town"] in ("Faro", "Oslo") and call.input["days"] in (1, 2)
        with client.messages.stream(messages=asked("Faro?"), **fields) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            assert json.loads("".join(pieces)) == call.input
            assert shown(stream.get_final_message()) == shown(whole)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        then = client.messages.create(
            messages=[
                *asked("Faro?"),
                {"role": "assistant", "content": whole.content},
                {"role": "user", "content": [result]},
            ],
            tools=[TOOL],
            **GREEDY,
        )
        assert then.usage.output_tokens > 0


def structured_outputs(facts: Facts) -> None:
    schema = TOOL["input_schema"]
    message = facts.client().messages.create(
        messages=asked("Faro?"), output_config={"format": {"type": "json_schema", "schema": schema}}, **GREEDY
    )
    assert message.stop_reason == "end_turn" and set(json.loads(message.content[0].text)) == {"town", "days"}


def thinks(facts: Facts) -> None:
    client, budget = facts.client(), {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(messages=asked(facts.question), thinking=budget, **GREEDY)
    assert whole.content[0].type == "thinking" and whole.content[0].signature == ""
    with client.messages.stream(messages=asked(facts.question), thinking=budget, **GREEDY) as stream:
        assert shown(stream.get_final_message()) == shown(whole)
    plain = client.messages.create(messages=asked(facts.question), thinking={"type": "disabled"}, **GREEDY)
    assert plain.content[0].text == facts.chats[facts.question]


def errors(facts: Facts) -> None:
    client, right = facts.client(), {"messages": asked("x"), **GREEDY}
    unknown = refusal(anthropic.NotFoundError, lambda: client.messages.create(**right | {"model": "claude"}))
    assert unknown.type == "not_found_error" and unknown.request_id == unknown.body["request_id"] is not None
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]
    bad = refusal(anthropic.BadRequestError, lambda: client.messages.create(**right | {"messages": image}))
    assert bad.type == "invalid_request_error" and "'image' is not implemented" in bad.body["error"]["message"]
    long = asked("word " * 5000)
    assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > 5000
    assert "context" in str(
        refusal(anthropic.BadRequestError, lambda: client.messages.create(**right | {"messages": long}))
    )
    for options in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
        keyed = facts.client(base_url=facts.keyed_url, **options)
        error = refusal(anthropic.AuthenticationError, lambda keyed=keyed: keyed.messages.create(**right))
        assert (error.status_code, error.type) == (401, "authentication_error")
    for options in ({"api_key": facts.key}, {"api_key": None, "auth_token": facts.key}):
        assert facts.client(base_url=facts.keyed_url, **options).messages.create(**right).usage.output_tokens > 0


def many_at_once(facts: Facts) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=facts.url, api_key="none", max_retries=0) as client:

            async def one(question: str) -> str:
                async with client.messages.stream(messages=asked(question), **GREEDY) as stream:
                    return "".join([text async for text in stream.text_stream])

            async with client.messages.stream(messages=asked(facts.question), **GREEDY) as left:
                async for _ in left.text_stream:
                    break  # and go
            questions = [*facts.chats] * 4
            assert await asyncio.gather(*map(one, questions)) == [facts.chats[question] for question in questions]

    asyncio.run(run())


SCENARIOS = (whole_answers, streams, how_it_ends, continues, calls, structured_outputs, thinks, errors, many_at_once)


def main() -> None:
    print(f"anthropic {anthropic.__version__}")
    facts = Facts(sys.argv[1])
    for scenario in SCENARIOS:
        scenario(facts)
        print(scenario.__name__, flush=True)


if __name__ == "__main__":
    main()

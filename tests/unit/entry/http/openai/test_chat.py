"""/v1/chat/completions: messages to prompts, answers, logprobs, templates that are there or not."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.text.chat import ChatTemplate
from quire.text.load import TextSide

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def ask(mock_engine: Any, make_client: Callable[..., Any]) -> Callable[..., Any]:
    client = make_client(mock_engine)

    def call(messages: Any = USER, **fields: Any) -> Any:
        return asyncio.run(client.post(PATH, {"messages": messages, "max_tokens": 4, **fields}))

    return call


@pytest.fixture
def prompt(mock_engine: Any, ask: Callable[..., Any]) -> Callable[..., str]:
    """The prompt that a request makes."""

    def call(*args: Any, **fields: Any) -> str:
        reply = ask(*args, **fields)
        assert reply.status == 200, reply.body
        return str(mock_engine.seen[-1][0][0].text)

    return call


def with_template(engine: Any, text_side: TextSide, source: str | None) -> None:
    template = None if source is None else ChatTemplate({"default": source})
    engine.text = replace(text_side, chat_template=template)


def test_an_answer(ask: Callable[..., Any]) -> None:
    reply = ask()
    answer = reply.json
    assert answer["object"] == "chat.completion" and answer["id"] == "chatcmpl-" + reply.header("x-request-id")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert "prompt_token_ids" not in answer and "token_ids" not in choice
    assert answer["usage"]["completion_tokens"] == 4


def test_max_completion_tokens_wins(ask: Callable[..., Any]) -> None:
    assert ask(max_completion_tokens=2).json["usage"]["completion_tokens"] == 2
    assert ask(max_tokens=None, max_completion_tokens=3).json["usage"]["completion_tokens"] == 3


def test_parts_read_like_text(prompt: Callable[..., str]) -> None:
    whole = prompt([{"role": "user", "content": "a\nb"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt([{"role": "user", "content": parts}]) == whole
    assert whole.endswith("assistant\n")


def test_the_developer_speaks_as_system(prompt: Callable[..., str]) -> None:
    said = {"content": "be brief"}
    assert prompt([{"role": "developer", **said}, *USER]) == prompt([{"role": "system", **said}, *USER])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_pictures_and_sounds_are_not_read(ask: Callable[..., Any], kind: str) -> None:
    reply = ask([{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": kind, kind: {"url": "x"}}]}])
    assert reply.status == 400 and "not implemented yet" in reply.error["message"] and kind in reply.error["message"]
    assert reply.error["param"] == "messages"


def test_continuing_the_last_message(prompt: Callable[..., str], ask: Callable[..., Any]) -> None:
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    assert prompt(messages, continue_final_message=True).endswith("Once upon")
    assert ask(messages, continue_final_message=True, add_generation_prompt=True).status == 400
    plain = ask(messages, continue_final_message=True, seed=1).json["choices"][0]["message"]["content"]
    echoed = ask(messages, continue_final_message=True, seed=1, echo=True).json["choices"][0]["message"]["content"]
    assert echoed == "Once upon" + plain
    assert not prompt(add_generation_prompt=False).endswith("assistant\n")


def test_a_history_with_reasoning_and_tools_is_taken(ask: Callable[..., Any]) -> None:
    for name in ("reasoning", "reasoning_content"):
        history = [
            *USER,
            {
                "role": "assistant",
                "content": None,
                name: "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ]
        assert ask(history).status == 200


def test_template_variables(
    mock_engine: Any, text_side: TextSide, prompt: Callable[..., str], ask: Callable[..., Any]
) -> None:
    source = "{{ mood }} {{ reasoning_effort }} {{ documents[0].t }} {{ messages[0].content }}"
    with_template(mock_engine, text_side, source)
    fields = {"chat_template_kwargs": {"mood": "glad"}, "documents": [{"t": "D"}], "reasoning_effort": "low"}
    assert prompt(**fields) == "glad low D hi"
    assert ask(**fields).all("x-quire-warning") == []
    for name in ("messages", "chat_template", "tools", "add_generation_prompt", "adapt_turns"):
        assert ask(chat_template_kwargs={name: 1}).error["param"] == "chat_template_kwargs"


def test_effort_without_effect_is_told(ask: Callable[..., Any]) -> None:
    assert "reasoning_effort" in ask(reasoning_effort="low").header("x-quire-warning")


def test_a_base_model_says_what_to_do(mock_engine: Any, text_side: TextSide, ask: Callable[..., Any]) -> None:
    with_template(mock_engine, text_side, None)
    reply = ask()
    assert reply.status == 400
    assert "/v1/completions" in reply.error["message"] and "--chat-template" in reply.error["message"]


def test_a_template_that_refuses(mock_engine: Any, text_side: TextSide, ask: Callable[..., Any]) -> None:
    with_template(mock_engine, text_side, "{{ raise_exception('no such role') }}")
    assert ask().status == 400 and "no such role" in ask().error["message"]


def test_logprobs(ask: Callable[..., Any]) -> None:
    (choice,) = ask(logprobs=True, top_logprobs=2, seed=1).json["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 4
    assert b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        numbers = [top["logprob"] for top in entry["top_logprobs"]]
        assert numbers == sorted(numbers, reverse=True)
    assert ask(logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert ask(top_logprobs=1).error["param"] == "top_logprobs"
    assert ask(top_logprobs=0).json["choices"][0]["logprobs"] is None  # has no effect


def test_the_bound_of_logprobs_is_the_servers(mock_engine: Any, ask: Callable[..., Any]) -> None:
    def top(number: int, bound: int) -> Any:
        mock_engine.front.limits = replace(mock_engine.front.limits, max_logprobs=bound)
        return ask(logprobs=True, top_logprobs=number, max_tokens=1)

    for number, bound, shown in ((25, 50, 25), (25, -1, 25), (-1, -1, mock_engine.ready.vocab_size)):
        (entry,) = top(number, bound).json["choices"][0]["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == shown
    for number, bound in ((6, 5), (21, 20), (-1, 20)):
        error = top(number, bound).error
        assert error["param"] == "top_logprobs" and f"top_logprobs={number} exceeds" in error["message"]
        assert f"--max-logprobs={bound}" in error["message"] and " logprobs=" not in error["message"]


def test_token_ids_and_prompt_logprobs(ask: Callable[..., Any]) -> None:
    answer = ask(return_token_ids=True, prompt_logprobs=0).json
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])
    assert len(answer["choices"][0]["token_ids"]) == 4


def test_a_long_conversation_is_prepared_off_the_loop(prompt: Callable[..., str]) -> None:
    assert "word " * 2000 in prompt([{"role": "user", "content": "word " * 2000 + "end"}])


@pytest.mark.parametrize(("field", "value"), [("audio", {"id": "a"}), ("images", ["aGk="])])
def test_pictures_and_sounds_beside_a_text_are_refused(ask: Callable[..., Any], field: str, value: Any) -> None:
    error = ask([{"role": "user", "content": "a", field: value}], max_tokens=1).error
    assert error["code"] == "unsupported_parameter" and f"messages[0].{field}" in error["message"]
    assert ask([{"role": "user", "content": "a", field: None}], max_tokens=1).status == 200


def test_of_an_answer_with_sound_that_is_sent_back_the_text_counts(prompt: Callable[..., str]) -> None:
    answer = {"role": "assistant", "content": "b"}
    for more in ({"audio": {"id": "a"}}, {"audio": {}, "images": []}):
        assert prompt([*USER, answer | more, *USER]) == prompt([*USER, answer, *USER])


def test_too_long(ask: Callable[..., Any]) -> None:
    error = ask([{"role": "user", "content": "word " * 5000}]).error
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    for name in ("max_tokens", "max_completion_tokens"):
        error = ask([{"role": "user", "content": "a"}], **{name: 5000}).error
        assert error["code"] == "context_length_exceeded" and error["param"] == name


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "1"},
        {"role": "user"},
        {"role": "system", "content": None},
    ],
)
def test_a_message_without_content_is_named(mock_engine: Any, make_client: Callable[..., Any], message: Any) -> None:
    said = [{"role": "user", "content": "a"}, message]
    error = asyncio.run(make_client(mock_engine).post(PATH, {"messages": said})).error
    assert error["message"].startswith("messages[1].content is missing") and message["role"] in error["message"]
    assert error["param"] == "messages"


@pytest.mark.parametrize("fields", [{"content": None}, {}, {"content": []}])
def test_an_assistant_that_said_nothing_has_said_the_empty_text(
    mock_engine: Any, make_client: Callable[..., Any], fields: Any
) -> None:
    def prompt(content: Any) -> Any:
        said = [{"role": "user", "content": "a"}, {"role": "assistant"} | content, {"role": "user", "content": "b"}]
        reply = asyncio.run(make_client(mock_engine).post("/tokenize", {"messages": said}))
        assert reply.status == 200, reply.error
        return reply.json["tokens"]

    assert prompt(fields) == prompt({"content": ""})

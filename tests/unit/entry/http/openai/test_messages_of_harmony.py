"""Chats with a model that writes messages (harmony): what the engine gets, and what the client gets, however sent."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.sampling import SamplingParams
from quire.engine.mock_core import build_mock_core
from quire.text.chat import ChatTemplate
from quire.text.load import TextSide, load_text
from quire.text.sequence import SequenceText

from .....support.harmony_tokenizer import HarmonyTokenizer
from .conftest import LocalEngine

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
TOKENIZER = HarmonyTokenizer()
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslø"}<|call|>'
FINAL = "<|channel|>final<|message|>Yes.<|return|>"


@pytest.fixture(autouse=True)
def harmony(scripted: Any, text_side: TextSide, shared: Path) -> None:
    source = (shared / "hf" / "templates" / "gpt_oss.jinja").read_text("utf-8")
    scripted.ready = msgspec.structs.replace(scripted.ready, max_model_len=2**17)
    scripted.text = replace(text_side, tokenizer=TOKENIZER, chat_template=ChatTemplate({"default": source}))


@pytest.fixture
def send(begin: Any, scripted: Any, make_client: Callable[..., Any], output: Any) -> Callable[..., Any]:
    """Send a request and let the model write `answer`, in pieces of `size` tokens. Return the reply."""

    def call(answer: str, size: int = 1000, path: str = PATH, **fields: Any) -> Any:
        async def main() -> Any:
            body = fields if path != PATH else {"messages": USER, **fields}
            task, reply, _, stream = await begin(make_client(scripted), path, body)
            prompt, params = scripted.prompts[-1][0], scripted.params[-1]
            ids, text = TOKENIZER.encode(answer, False), SequenceText(TOKENIZER, prompt.token_ids, params)
            size_ = size if fields.get("stream") else len(ids)
            for at in range(0, len(ids), size_):
                last = at + size_ >= len(ids)
                delta, _ = text.push(ids[at : at + size_], last, ended_by_token=last)
                stream.put(output(delta, tokens=ids[at : at + size_], finish="stop" if last else None))
            stream.put(None)
            await task
            assert reply.status == 200, reply.body
            return reply

        return asyncio.run(main())

    return call


def joined(reply: Any) -> dict[str, Any]:
    """The message that the events of a stream add up to, with the finish reason."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for event in reply.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["calls"].append([call["function"]["name"], ""])
                found["calls"][call["index"]][1] += call["function"]["arguments"]
            found["reason"] = choice["finish_reason"] or found["reason"]
    return found


def test_reasoning_and_a_call(send: Callable[..., Any], scripted: Any) -> None:
    reply = send(THOUGHT + CALL, tools=[TOOL])
    (choice,) = reply.json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hm."
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Oslø"})
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert reply.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    assert scripted.params[-1].structured_outputs is None
    assert scripted.prompts[-1][0].text.endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_adds_up_to_the_same(send: Callable[..., Any], size: int) -> None:
    reply = send(THOUGHT + CALL, size, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    expected = {"content": "", "reasoning": "Hm.", "calls": [["weather", '{"city": "Oslø"}']], "reason": "tool_calls"}
    assert joined(reply) == expected
    assert reply.events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    reply = send(THOUGHT + FINAL, size, stream=True)
    assert joined(reply) == {"content": "Yes.", "reasoning": "Hm.", "calls": [], "reason": "stop"}
    reply = send(THOUGHT + FINAL, size, stream=True, include_reasoning=False, skip_special_tokens=False)
    assert joined(reply) == {"content": "Yes.", "reasoning": "", "calls": [], "reason": "stop"}


def test_a_built_in_tool_that_the_model_calls_gives_an_empty_answer(send: Callable[..., Any]) -> None:
    built_in = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
    (choice,) = send(THOUGHT + built_in, tools=[TOOL]).json["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "Hm.")
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


def test_effort_and_date_reach_the_prompt(send: Callable[..., Any], scripted: Any) -> None:
    send(FINAL, reasoning_effort="high", chat_template_kwargs={"strftime_now": "2026-01-02"})
    text = scripted.prompts[-1][0].text
    assert "\nReasoning: high\n" in text and "\nCurrent date: 2026-01-02\n" in text
    send(FINAL, path="/v1/responses", input="hi", reasoning={"effort": "low"})
    assert "\nReasoning: low\n" in scripted.prompts[-1][0].text


def test_refusals(refusal_of: Callable[..., Any]) -> None:
    error = refusal_of(reasoning_effort="minimal")
    assert error["param"] == "reasoning_effort" and "send low, medium, high" in error["message"]
    error = refusal_of("/v1/responses", input="hi", reasoning={"effort": "none"})
    assert error["param"] == "reasoning" and "reasoning.effort is 'none'" in error["message"]
    error = refusal_of(chat_template_kwargs={"builtin_tools": ["python"]})
    assert error["param"] == "chat_template_kwargs" and "python, browser, container" in error["message"]
    assert "'today'" in refusal_of(chat_template_kwargs={"strftime_now": "today"})["message"]
    error = refusal_of(structured_outputs={"grammar": "start: A\nA: /a/"})
    assert error["param"] == "structured_outputs" and "not implemented" in error["message"]
    error = refusal_of("/v1/responses", input="hi", tools=[{"type": "code_interpreter"}])
    assert "code_interpreter" in error["message"]


def test_structured_output_holds_the_turn(send: Callable[..., Any], scripted: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = THOUGHT + '<|channel|>final<|message|>{"city": "Oslo"}<|return|>'
    (choice,) = send(answer, response_format=form).json["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ('{"city": "Oslo"}', "Hm.")
    params: SamplingParams = scripted.params[-1]
    assert params.structured_outputs is not None and params.structured_outputs.after is None
    assert f"<[{TOKENIZER.token_id('<|channel|>')}]>" in str(params.structured_outputs.grammar)
    (choice,) = send(THOUGHT + CALL, tools=[TOOL], tool_choice="required").json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = send(THOUGHT + CALL, tools=[TOOL], tool_choice=named).json["choices"]
    assert choice["finish_reason"] == "stop" and len(choice["message"]["tool_calls"]) == 1


def test_a_continued_answer(send: Callable[..., Any]) -> None:
    messages = [*USER, {"role": "assistant", "content": "One"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    (choice,) = send(" two<|return|>", **body).json["choices"]
    assert choice["message"]["content"] == " two"


def test_the_messages_route(send: Callable[..., Any]) -> None:
    tool = {"name": "weather", "description": "d", "input_schema": CITY}
    reply = send(THOUGHT + CALL, path="/v1/messages", model="tiny", max_tokens=99, messages=USER, tools=[tool])
    assert [block["type"] for block in reply.json["content"]] == ["thinking", "tool_use"]
    assert reply.json["content"][1]["input"] == {"city": "Oslø"} and reply.json["stop_reason"] == "tool_use"


def test_the_responses_route(send: Callable[..., Any]) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    reply = send(THOUGHT + CALL, path="/v1/responses", input="hi", tools=[tool])
    assert [item["type"] for item in reply.json["output"]] == ["reasoning", "function_call"]


def test_a_core_that_obeys_the_grammar_writes_a_call(
    tmp_path: Path, scripted: Any, make_client: Callable[..., Any]
) -> None:
    """The mock samples any token that the masks allow."""
    pytest.importorskip("llguidance")
    TOKENIZER._backend.save(str(tmp_path / "tokenizer.json"))
    named = {"eos_token": "<|return|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    config = json.loads((bundled_model() / "config.json").read_text())
    config |= {"vocab_size": TOKENIZER.vocab_size + 5, "eos_token_id": TOKENIZER.eos_token_id}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(scripted.text.chat_template.source(), "utf-8")
    engine = LocalEngine(build_mock_core(EngineConfig(), tmp_path), load_text(EngineConfig(), tmp_path))
    places = {"type": "object", "properties": {"city": {"enum": ["Oslø", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": places}}
    body = {"tools": [tool], "tool_choice": "required", "max_tokens": 400}
    calls = 0
    for number in range(8):
        asked = {**body, "messages": [{"role": "user", "content": f"hi {number}"}], "stream": number % 2 == 1}
        reply = asyncio.run(make_client(engine).post(PATH, asked))
        assert reply.status == 200, reply.body
        if asked["stream"]:
            found, reason = joined(reply)["calls"], joined(reply)["reason"]
        else:
            (choice,) = reply.json["choices"]
            made, reason = choice["message"].get("tool_calls", ()), choice["finish_reason"]
            found = [[call["function"]["name"], call["function"]["arguments"]] for call in made]
        if reason == "length":  # still in a free text
            continue
        ((name, arguments),) = found
        assert (name, reason) == ("weather", "tool_calls") and json.loads(arguments)["city"] in ("Oslø", "Rome")
        calls += 1
    assert calls > 1

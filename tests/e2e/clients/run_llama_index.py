"""Requests of llama-index through OpenAILike: completions and chat, streams, tools, typed answers."""

from typing import Any, Literal

import openai
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict
from scenario import MODEL, Facts, main, refusal


class Trip(BaseModel):
    """A trip."""

    model_config = ConfigDict(extra="forbid")
    town: Literal["Faro", "Oslo"]
    days: Literal[1, 2]


def model(facts: Facts, **options: Any) -> OpenAILike:
    return OpenAILike(
        **(
            {
                "model": MODEL,
                "api_base": facts.base,
                "api_key": "none",
                "temperature": 0,
                "max_tokens": 60,
                "max_retries": 0,
                "is_chat_model": True,
                "is_function_calling_model": True,
                "context_window": 1024,
            }
            | options
        )
    )


def chats_and_streams(facts: Facts) -> None:
    for question, text in facts.chats.items():
        asked = [ChatMessage(role=MessageRole.USER, content=question)]
        assert model(facts).chat(asked).message.content == text
        pieces = [piece.delta for piece in model(facts).stream_chat(asked)]
        assert "".join(pieces) == text and len(pieces) > 2


def completions(facts: Facts) -> None:
    """Without is_chat_model it asks /v1/completions."""
    writer = model(facts, is_chat_model=False, max_tokens=24)
    for prompt, text in facts.texts.items():
        assert writer.complete(prompt).text == text == "".join(p.delta for p in writer.stream_complete(prompt))


def tools(facts: Facts) -> None:
    def get_weather(city: str) -> str:
        return facts.call["result"]

    tool = FunctionTool.from_defaults(get_weather, name="get_weather", description="Current weather of a city")
    for fields in ({}, {"tool_required": True}, {"tool_choice": "get_weather"}):
        answer = model(facts).chat_with_tools([tool], facts.call["question"], **fields)
        (made,) = model(facts).get_tool_calls_from_response(answer)
        assert made.tool_name == "get_weather" and "city" in made.tool_kwargs
        assert fields or made.tool_kwargs == facts.call["arguments"]
        *_, last = model(facts).stream_chat_with_tools([tool], facts.call["question"], **fields)
        (again,) = model(facts).get_tool_calls_from_response(last)
        assert again.tool_kwargs == made.tool_kwargs
    first = model(facts).chat_with_tools([tool], facts.call["question"])
    (made,) = model(facts).get_tool_calls_from_response(first)
    result = ChatMessage(
        role=MessageRole.TOOL, content=facts.call["result"], additional_kwargs={"tool_call_id": made.tool_id}
    )
    asked = ChatMessage(role=MessageRole.USER, content=facts.call["question"])
    answer = model(facts).chat_with_tools([tool], chat_history=[asked, first.message, result])
    assert answer.message.content == facts.call["answer"], answer


def structured_outputs(facts: Facts) -> None:
    asked = [ChatMessage(role=MessageRole.USER, content=facts.structured["question"])]
    made = model(facts).as_structured_llm(Trip).chat(asked).raw
    assert isinstance(made, Trip)
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": facts.structured["schema"]}}
    answer = model(facts).chat(asked, response_format=schema).message.content
    assert Trip.model_validate_json(answer) == Trip(**facts.structured["value"])


def errors(facts: Facts) -> None:
    asked = [ChatMessage(role=MessageRole.USER, content="x")]
    assert refusal(openai.NotFoundError, model(facts, model="gpt").chat, asked).code == "model_not_found"
    long = [ChatMessage(role=MessageRole.USER, content="word " * 5000)]
    assert refusal(openai.BadRequestError, model(facts).chat, long).code == "context_length_exceeded"
    wrong = model(facts, api_base=facts.keyed_base)
    assert refusal(openai.AuthenticationError, wrong.chat, asked).code == "invalid_api_key"
    assert model(facts, api_base=facts.keyed_base, api_key=facts.key).chat(asked).message.content


main("llama-index-llms-openai-like", chats_and_streams, completions, tools, structured_outputs, errors)

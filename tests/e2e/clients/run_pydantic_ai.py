"""Requests of pydantic-ai: agents with tools and typed output, over chat, responses and Anthropic's messages."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ThinkingPart, Tool, ToolCallPart, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import MODEL, Facts, main, refusal

SETTINGS: Any = {"temperature": 0, "max_tokens": 60}
ANTHROPIC: Any = {"max_tokens": 60, "extra_body": {"temperature": 0}}


class Trip(BaseModel):
    """A trip."""

    model_config = ConfigDict(extra="forbid")
    town: Literal["Faro", "Oslo"]
    days: Literal[1, 2]


def models(facts: Facts, key: str = "none", name: str = MODEL, keyed: bool = False) -> Iterator[tuple[Model, Any]]:
    """The three APIs, with the settings that mean greedy."""
    url = facts.keyed_url if keyed else facts.url
    openai = OpenAIProvider(base_url=url + "/v1", api_key=key)
    yield OpenAIChatModel(name, provider=openai), SETTINGS
    yield OpenAIResponsesModel(name, provider=openai), SETTINGS
    yield AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key=key)), ANTHROPIC


def chats_and_streams(facts: Facts) -> None:
    async def streamed(agent: Any, question: str) -> list[str]:
        async with agent.run_stream(question) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    for model, settings in models(facts):
        agent = Agent(model, model_settings=settings)
        for question, text in facts.chats.items():
            whole = agent.run_sync(question)
            assert whole.output == text and whole.usage.output_tokens > 0, (model, whole.output)
            pieces = asyncio.run(streamed(Agent(fresh(facts, model), model_settings=settings), question))
            assert "".join(pieces) == text and len(pieces) > 1


def fresh(facts: Facts, model: Model) -> Model:
    """The same again: a connection belongs to one event loop."""
    return next(other for other, _ in models(facts) if type(other) is type(model))


def tools(facts: Facts) -> None:
    """The model calls by itself, the agent answers with the result, and the model says what it has learnt."""
    told: list[str] = []

    def get_weather(city: str) -> str:
        told.append(city)
        return facts.call["result"]

    tool = Tool(get_weather, name="get_weather", description="Current weather of a city")
    for model, settings in models(facts):
        told.clear()
        run = Agent(model, tools=[tool], model_settings=settings).run_sync(facts.call["question"])
        assert run.output == facts.call["answer"], (model, run.output)
        (made,) = [part for message in run.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
        assert (made.tool_name, made.args_as_dict()) == (facts.call["name"], facts.call["arguments"])
        assert told == [facts.call["arguments"]["city"]]


def structured_outputs(facts: Facts) -> None:
    for model, settings in models(facts):
        agent = Agent(model, output_type=ToolOutput(Trip), model_settings=settings)
        made = agent.run_sync(facts.structured["question"])
        assert isinstance(made.output, Trip)
        if not isinstance(model, AnthropicModel):  # its profile has no native output for a name it does not know
            made = Agent(model, output_type=NativeOutput(Trip), model_settings=settings).run_sync(
                facts.structured["question"]
            )
            assert made.output == Trip(**facts.structured["value"]), (model, made.output)


def reasoning(facts: Facts) -> None:
    """Of a response, the client reads reasoning only from its summary, which has to be asked for."""
    extra = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "openai_reasoning_summary": "auto"}
    for model, settings in list(models(facts))[:2]:
        run = Agent(model, model_settings=settings | extra).run_sync(facts.thought["question"])
        thoughts = [p.content for m in run.all_messages() for p in m.parts if isinstance(p, ThinkingPart)]
        assert (thoughts, run.output) == ([facts.thought["reasoning"]], facts.thought["answer"]), (model, thoughts)


def errors(facts: Facts) -> None:
    for model, settings in models(facts, name="gpt"):
        error = refusal(ModelHTTPError, Agent(model, model_settings=settings).run_sync, "x")
        assert error.status_code == 404 and "gpt" in str(error.body)
    for model, settings in models(facts, keyed=True):
        error = refusal(ModelHTTPError, Agent(model, model_settings=settings).run_sync, "x")
        assert error.status_code == 401
    for model, settings in models(facts, key=facts.key, keyed=True):
        assert Agent(model, model_settings=settings).run_sync("x").output


main("pydantic-ai-slim", chats_and_streams, tools, structured_outputs, reasoning, errors)

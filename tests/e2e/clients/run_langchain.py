"""Requests of langchain-openai: chat, streams, tools, schemas, embeddings, completions, both APIs of OpenAI."""

import os
from typing import Any, Literal

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from scenario import MODEL, Facts, close, main, refusal

os.environ["LANGSMITH_TRACING"] = "false"


class Trip(BaseModel):
    """A trip."""

    town: Literal["Faro", "Oslo"]
    days: Literal[1, 2]


@tool
def get_weather(city: str) -> str:
    """Current weather of a city"""
    return city


def model(facts: Facts, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **(
            {
                "base_url": facts.base,
                "api_key": "none",
                "model": MODEL,
                "temperature": 0,
                "max_tokens": 60,
                "max_retries": 0,
            }
            | options
        )
    )


def chats_and_streams(facts: Facts) -> None:
    for api in (False, True):
        chat = model(facts, use_responses_api=api)
        for question, text in facts.chats.items():
            whole = chat.invoke(question)
            assert whole.text == text and whole.usage_metadata["output_tokens"] > 0
            pieces = list(chat.stream(question))
            assert "".join(piece.text for piece in pieces) == text and len([p for p in pieces if p.text]) > 1
        answers = chat.batch(list(facts.chats))
        assert [answer.text for answer in answers] == list(facts.chats.values())


def tools(facts: Facts) -> None:
    question, call = HumanMessage(facts.call["question"]), facts.call
    for api in (False, True):
        for choice in ("auto", "required", "get_weather"):
            bound = model(facts, use_responses_api=api).bind_tools([get_weather], tool_choice=choice)
            first = bound.invoke([question])
            (made,) = first.tool_calls
            assert made["name"] == call["name"] and made["args"].keys() == call["arguments"].keys()
            assert choice != "auto" or made["args"] == call["arguments"]
            total = None
            for piece in bound.stream([question]):
                total = piece if total is None else total + piece
            assert [(c["name"], c["args"]) for c in total.tool_calls] == [(made["name"], made["args"])]
        past = AIMessage("", tool_calls=[{"name": call["name"], "args": call["arguments"], "id": "call_1"}])
        result = ToolMessage(call["result"], tool_call_id="call_1")
        free = model(facts, use_responses_api=api).bind_tools([get_weather], tool_choice="auto")
        assert free.invoke([question, past, result]).text == call["answer"]


def structured_outputs(facts: Facts) -> None:
    for api in (False, True):
        for method in ("json_schema", "function_calling"):
            made = (
                model(facts, use_responses_api=api)
                .with_structured_output(Trip, method=method)
                .invoke(facts.structured["question"])
            )
            assert isinstance(made, Trip)
            assert method != "json_schema" or made == Trip(**facts.structured["value"])


def vectors(facts: Facts) -> None:
    embeddings = OpenAIEmbeddings(base_url=facts.base, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    for found, right in zip(embeddings.embed_documents(list(facts.embeddings)), facts.embeddings.values(), strict=True):
        assert close(found, right)


def completions(facts: Facts) -> None:
    writer = OpenAI(base_url=facts.base, api_key="none", model=MODEL, temperature=0, max_tokens=24)
    assert writer.invoke(facts.prompt) == facts.texts[facts.prompt] == "".join(writer.stream(facts.prompt))


def logprobs(facts: Facts) -> None:
    answer = model(facts, logprobs=True, top_logprobs=2).invoke(facts.question)
    content = answer.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode().startswith(facts.chats[facts.question])
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in content)


def errors(facts: Facts) -> None:
    for api in (False, True):
        error = refusal(openai.NotFoundError, model(facts, use_responses_api=api, model="gpt").invoke, "x")
        assert error.code == "model_not_found"
        error = refusal(ContextOverflowError, model(facts, use_responses_api=api).invoke, "word " * 5000)
        assert error.code == "context_length_exceeded" and isinstance(error, openai.BadRequestError)
        wrong = model(facts, use_responses_api=api, base_url=facts.keyed_base)
        assert refusal(openai.AuthenticationError, wrong.invoke, "x").code == "invalid_api_key"
        assert model(facts, use_responses_api=api, base_url=facts.keyed_base, api_key=facts.key).invoke("x").id


main("langchain-openai", chats_and_streams, tools, structured_outputs, vectors, completions, logprobs, errors)

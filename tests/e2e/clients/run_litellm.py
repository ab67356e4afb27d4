"""Requests of litellm: both prefixes, streams, tools, schemas, reasoning, embeddings, completions, both APIs."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which would fetch a list from the web

import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel
from scenario import MODEL, Facts, close, main, refusal

litellm.suppress_debug_info = True  # prints advice beside every error
PREFIXES = ("openai/", "hosted_vllm/")


class Trip(BaseModel):
    """A trip."""

    town: Literal["Faro", "Oslo"]
    days: Literal[1, 2]


def ask(facts: Facts, question: str, **options: Any) -> Any:
    return litellm.completion(
        **(
            {
                "model": PREFIXES[0] + MODEL,
                "api_base": facts.base,
                "api_key": "none",
                "temperature": 0,
                "max_tokens": 60,
                "max_retries": 0,
                "messages": [{"role": "user", "content": question}],
            }
            | options
        )
    )


def chats_and_streams(facts: Facts) -> None:
    for prefix in PREFIXES:
        for question, text in facts.chats.items():
            whole = ask(facts, question, model=prefix + MODEL)
            assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "stop"
            options = {"include_usage": True}
            pieces = list(ask(facts, question, model=prefix + MODEL, stream=True, stream_options=options))
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
            assert litellm.stream_chunk_builder(pieces).usage.completion_tokens == whole.usage.completion_tokens


def tools(facts: Facts) -> None:
    call, named = facts.call, {"type": "function", "function": {"name": "get_weather"}}
    for prefix in PREFIXES:
        for choice in ("auto", "required", named):
            fields = {"model": prefix + MODEL, "tools": call["tools"], "tool_choice": choice}
            first = ask(facts, call["question"], **fields).choices[0]
            (made,) = first.message.tool_calls
            assert made.function.name == call["name"] and "city" in json.loads(made.function.arguments)
            assert choice != "auto" or json.loads(made.function.arguments) == call["arguments"]
            streamed = litellm.stream_chunk_builder(list(ask(facts, call["question"], stream=True, **fields)))
            assert streamed.choices[0].message.tool_calls[0].function == made.function
        turns = [
            {"role": "user", "content": call["question"]},
            ask(facts, call["question"], tools=call["tools"]).choices[0].message,
            {"role": "tool", "tool_call_id": made.id, "content": call["result"]},
        ]
        again = ask(facts, "", model=prefix + MODEL, messages=turns, tools=call["tools"])
        assert again.choices[0].message.content == call["answer"]


def structured_outputs(facts: Facts) -> None:
    for prefix in PREFIXES:
        made = ask(facts, facts.structured["question"], model=prefix + MODEL, response_format=Trip)
        assert Trip.model_validate_json(made.choices[0].message.content) == Trip(**facts.structured["value"])


def reasoning(facts: Facts) -> None:
    """The client has one name for it, of the two that the server writes."""
    for prefix in PREFIXES:
        fields: Any = {"model": prefix + MODEL, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        message = ask(facts, facts.thought["question"], **fields).choices[0].message
        assert (message.reasoning_content, message.content) == (facts.thought["reasoning"], facts.thought["answer"])
        pieces = list(ask(facts, facts.thought["question"], stream=True, **fields))
        told = "".join(getattr(piece.choices[0].delta, "reasoning_content", None) or "" for piece in pieces)
        assert told == facts.thought["reasoning"]


def vectors(facts: Facts) -> None:
    for prefix in PREFIXES:
        answer = litellm.embedding(
            model=prefix + MODEL,
            api_base=facts.base,
            api_key="none",
            input=list(facts.embeddings),
            encoding_format="float",
        )
        for one, right in zip(answer.data, facts.embeddings.values(), strict=True):
            assert close(one["embedding"], right)


def completions(facts: Facts) -> None:
    for prompt, text in facts.texts.items():
        answer = litellm.text_completion(
            model="text-completion-openai/" + MODEL,
            api_base=facts.base,
            api_key="none",
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            logprobs=1,
        )
        assert answer.choices[0].text == text and len(answer.choices[0].logprobs.token_logprobs) == 24


def responses(facts: Facts) -> None:
    for question, text in facts.chats.items():
        fields: Any = {
            "model": "openai/" + MODEL,
            "api_base": facts.base,
            "api_key": "none",
            "input": question,
            "max_output_tokens": 60,
            "temperature": 0,
        }
        whole = litellm.responses(**fields)
        assert "".join(part.text for item in whole.output for part in item.content) == text
        events = list(litellm.responses(stream=True, **fields))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text


def errors(facts: Facts) -> None:
    for prefix in PREFIXES:
        named = prefix + MODEL
        assert refusal(litellm.NotFoundError, ask, facts, "x", model=named + "x").status_code == 404
        error = refusal(litellm.ContextWindowExceededError, ask, facts, "word " * 5000, model=named)
        assert error.status_code == 400 and "context" in str(error)
        assert refusal(litellm.BadRequestError, ask, facts, "x", model=named, temperature=3).status_code == 400
        refusal(litellm.AuthenticationError, ask, facts, "x", model=named, api_base=facts.keyed_base)
        assert ask(facts, "x", model=named, api_base=facts.keyed_base, api_key=facts.key).choices


main("litellm", chats_and_streams, tools, structured_outputs, reasoning, vectors, completions, responses, errors)

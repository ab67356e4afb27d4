"""Requests of instructor: typed answers in all its modes, streamed in parts and in lists, with retries."""

import json
from typing import Annotated, Any, Literal

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field, field_validator
from scenario import MODEL, Facts, main, refusal

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)  # in which the server keeps the answer to the schema


class Trip(BaseModel):
    """A trip; without the first line so small a model goes on inventing fields."""

    model_config = ConfigDict(extra="forbid")

    town: Literal["Faro", "Oslo"]
    days: Literal[1, 2]


class Trips(BaseModel):
    """Two trips."""

    model_config = ConfigDict(extra="forbid")
    trips: Annotated[list[Trip], Field(min_length=2, max_length=2)]


class Nowhere(BaseModel):
    """A type that no answer can have."""

    model_config = ConfigDict(extra="forbid")

    town: Literal["Faro", "Oslo"]

    @field_validator("town")
    @classmethod
    def refuse(cls, town: str) -> str:
        """Nothing is right."""
        raise ValueError(f"not {town}")


def client(facts: Facts, mode: instructor.Mode, **options: Any) -> Any:
    base: dict[str, Any] = {"base_url": facts.base, "api_key": "none", "max_retries": 0} | options
    return instructor.from_openai(openai.OpenAI(**base), mode=mode)


def asked(facts: Facts, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
        "messages": [{"role": "user", "content": facts.structured["question"]}],
    } | options


def typed_answers(facts: Facts) -> None:
    for mode in MODES:
        made, raw = client(facts, mode).create_with_completion(response_model=Trip, **asked(facts))
        assert isinstance(made, Trip) and raw.usage.completion_tokens > 0
        choice = raw.choices[0]
        assert bool(choice.message.tool_calls) == (mode is instructor.Mode.TOOLS)
        assert mode is instructor.Mode.TOOLS or made.model_dump() == facts.structured["value"]
    error = refusal(
        InstructorRetryException, client(facts, instructor.Mode.JSON).create, response_model=Trip, **asked(facts)
    )  # the schema is only part of the prompt: what comes is some JSON
    assert isinstance(json.loads(error.last_completion.choices[0].message.content), dict)


def parts(facts: Facts) -> None:
    for mode in MODES:
        whole = client(facts, mode).create(response_model=Trip, **asked(facts)).model_dump()
        *_, last = seen = list(client(facts, mode).create_partial(response_model=Trip, **asked(facts)))
        assert last.model_dump() == whole and len(seen) > 2 and seen[0].days is None
        assert mode is instructor.Mode.TOOLS or whole == facts.structured["value"]


def lists(facts: Facts) -> None:
    """Types in types, and how many of them: the schema has definitions and bounds, and the server keeps to both."""
    for mode in MODES:
        made = client(facts, mode).create(response_model=Trips, **asked(facts))
        assert len(made.trips) == 2 and all(one.town in ("Faro", "Oslo") and one.days in (1, 2) for one in made.trips)


def plain_answers(facts: Facts) -> None:
    for question, text in facts.chats.items():
        answer = client(facts, MODES[0]).create(
            response_model=None, **asked(facts, messages=[{"role": "user", "content": question}])
        )
        assert answer.choices[0].message.content == text


def retries(facts: Facts) -> None:
    """instructor sends an answer that its checks refuse back with the reason: calls and results are messages again."""
    for mode in MODES:
        error = refusal(
            InstructorRetryException, client(facts, mode).create, response_model=Nowhere, **asked(facts, max_retries=2)
        )
        assert error.n_attempts >= 2 and "not " in str(error)


def errors(facts: Facts) -> None:
    for options, kind, status in (
        (asked(facts, model="gpt"), openai.NotFoundError, 404),
        (asked(facts, temperature=3), openai.BadRequestError, 400),
    ):
        error = refusal(InstructorRetryException, client(facts, MODES[0]).create, response_model=Trip, **options)
        cause: Any = error
        while cause is not None and not isinstance(cause, kind):
            cause = cause.__cause__ or (cause.args and isinstance(cause.args[0], Exception) and cause.args[0]) or None
        assert cause is not None and cause.status_code == status


main("instructor", typed_answers, parts, lists, plain_answers, retries, errors)

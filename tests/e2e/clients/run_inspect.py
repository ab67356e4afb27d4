"""An evaluation of inspect-ai: plain answers, a tool that the model calls, a typed answer."""

import json
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ResponseSchema
from inspect_ai.scorer import exact
from inspect_ai.solver import Solver, generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import JSONSchema
from scenario import MODEL, Facts, main


def evaluated(facts: Facts, name: str, samples: list[Sample], *solvers: Solver, **config: Any) -> Any:
    """The log of an evaluation over /v1/chat/completions that must end."""
    config = {"temperature": 0.0, "max_tokens": 60, "max_retries": 0} | config
    (log,) = eval(
        Task(dataset=samples, solver=list(solvers), scorer=exact(), name=name),
        display="none",
        model="openai-api/quire/" + MODEL,
        model_base_url=facts.base,
        model_args={"api_key": "none"},
        log_dir=str(facts.folder / "inspect"),
        **config,
    )
    assert log.status == "success", log.error
    return log


def accuracy(log: Any) -> float:
    return log.results.scores[0].metrics["mean"].value


def answers(facts: Facts) -> None:
    samples = [Sample(input=question, target=text) for question, text in facts.chats.items()]
    log = evaluated(facts, "answers", samples, generate())
    assert accuracy(log) == 1.0 and len(log.samples) == len(samples)
    (usage,) = log.stats.model_usage.values()
    assert usage.output_tokens > 0


def calls(facts: Facts) -> None:
    @tool(name="get_weather")
    def weather() -> Tool:
        async def execute(city: str) -> str:
            """Current weather of a city

            Args:
                city: Its name
            """
            assert city == facts.call["arguments"]["city"]
            return facts.call["result"]

        return execute

    samples = [Sample(input=facts.call["question"], target=facts.call["answer"])]
    log = evaluated(facts, "calls", samples, use_tools(weather()), generate())
    assert accuracy(log) == 1.0, log.samples[0].output
    assert [message.role for message in log.samples[0].messages] == ["user", "assistant", "tool", "assistant"]


def structured_outputs(facts: Facts) -> None:
    schema = ResponseSchema(name="trip", json_schema=JSONSchema.model_validate(facts.structured["schema"]))
    log = evaluated(
        facts,
        "structured_outputs",
        [Sample(input=facts.structured["question"], target="")],
        generate(),
        response_schema=schema,
    )
    assert json.loads(log.samples[0].output.completion) == facts.structured["value"]


def reasoning(facts: Facts) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    samples = [Sample(input=facts.thought["question"], target=facts.thought["answer"])]
    log = evaluated(facts, "reasoning", samples, generate(), extra_body=extra)
    thoughts = [part.reasoning for part in log.samples[0].output.message.content if part.type == "reasoning"]
    assert thoughts == [facts.thought["reasoning"]] and accuracy(log) == 1.0


def errors(facts: Facts) -> None:
    (log,) = eval(
        Task(dataset=[Sample(input="x", target="x")], solver=generate(), scorer=exact()),
        display="none",
        model="openai-api/quire/" + MODEL,
        model_base_url=facts.keyed_base,
        model_args={"api_key": "none"},
        log_dir=str(facts.folder / "inspect"),
        max_retries=0,
    )
    assert log.status == "error" and "AuthenticationError" in log.error.traceback


main("inspect-ai", answers, calls, structured_outputs, reasoning, errors)

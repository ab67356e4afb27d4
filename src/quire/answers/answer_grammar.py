"""The structured output of an answer that may hold reasoning, tool calls and content, as its plan for parsing says."""

from typing import Any

import msgspec

from quire.answers.choice_parser import ParserPlan
from quire.answers.message_grammar import message_grammar
from quire.answers.tool_grammar import tool_grammar
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import StructuredOutputsParams
from quire.text.output_styles import OutputStyles
from quire.text.tokenizer import Tokenizer


def held_answer(
    plan: ParserPlan,
    tokenizer: Tokenizer | None,
    structured: StructuredOutputsParams | None,
    *,
    bound: bool,
    budget: int | None,
) -> StructuredOutputsParams | None:
    """Return the structured output of an answer; None for free text.

    structured   structured output of the content, which the request asks for
    bound        True: a grammar must force the answer to follow the choice of tools and strict schemas
    budget       maximum tokens of a reasoning that the prompt has begun; None: no limit
    Raises `InvalidParameter` for a structured output that cannot be combined with tool calls.
    """
    styles = plan.styles
    assert styles is not None
    if styles.messages is not None and tokenizer is not None:
        answer = None if plan.must else structured
        if answer is None and not (plan.tools and bound):
            return None
        return message_grammar(styles.messages, tokenizer, plan.opened, tools=plan.tools, must=plan.must, answer=answer)
    schema = _schema_beside_calls(structured) if structured is not None and plan.tools else None
    if plan.tools and (bound or styles.tools is None) and (structured is None or plan.must):
        structured = StructuredOutputsParams(
            grammar=tool_grammar(
                styles,
                plan.tools,
                "required" if plan.must else "auto",
                parallel=plan.parallel,
                thinking=plan.thinking,
            ),
            inside=True,
        )
    elif schema is not None:
        structured = _calls_or(schema, styles, plan)
    if plan.thinking and styles.reasoning is not None:
        if structured is not None:
            structured.after, structured.budget = styles.reasoning.end, budget
        elif budget is not None:
            structured = StructuredOutputsParams(after=styles.reasoning.end, budget=budget)
    return structured


def _schema_beside_calls(structured: StructuredOutputsParams) -> dict[str, Any]:
    """Return the JSON schema of structured output beside tools. Errors: 400 for every other kind of grammar."""
    schema = {"type": "object"} if structured.json_object else {} if structured.json is True else structured.json
    if not isinstance(schema, dict):
        raise InvalidParameter(
            "where tools may be called, the answer's format can only be a JSON schema: send "
            'tool_choice="none" with another format.',
            param="tools",
        )
    return schema


def _calls_or(schema: dict[str, Any], styles: OutputStyles, plan: ParserPlan) -> StructuredOutputsParams:
    """Return the structured output "tool calls, or an answer that fits `schema`"."""
    styles = msgspec.structs.replace(styles, reasoning=None)  # `after` of the structured output skips reasoning
    calls = tool_grammar(styles, plan.tools, "required", parallel=plan.parallel).replace("start: ", "calls: ", 1)
    text = msgspec.json.encode(schema).decode()
    return StructuredOutputsParams(grammar=f"start: answer | calls\nanswer: %json {text}\n{calls}")

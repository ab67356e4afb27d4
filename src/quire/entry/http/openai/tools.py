"""The tools of a request: those shown to the model, those it may or must call, and the grammar this gives its answer.

Knows the fields of a request. `quire.answers` knows the syntax of a model's calls.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.answers.answer_grammar import held_answer
from quire.answers.choice_parser import ParserPlan
from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.sampling import SamplingParams
from quire.entry.http.openai.schema import ChatRequest, Tool, ToolChoice
from quire.entry.prompts import Prompt
from quire.text.load import TextSide
from quire.text.output_styles import thinking_at_end

NO_BUDGET = -1
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}  # no parameters


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The use of tools that a request asks for.

    shown      tools for the model, as chat templates read them; None = no tools
    callable   tools that may be called; () = the answer is not parsed for calls
    must       the model must call a tool
    named      tool_choice names the only tool that may be called
    bound      a grammar must force the answer to follow tool_choice and strict schemas
    """

    shown: list[dict[str, Any]] | None = None
    callable: tuple[dict[str, Any], ...] = ()
    must: bool = False
    named: bool = False
    bound: bool = False


def tool_use(request: ChatRequest, *, hide_idle: bool) -> ToolUse:
    """Return the use of tools that a request asks for. Raises 400.
    `hide_idle`: with tool_choice="none", do not show the tools to the model."""
    tools = plain_tools(request.tools or ())
    by_name = {tool["function"]["name"]: tool for tool in tools}
    choice = request.tool_choice or ("auto" if tools else "none")
    if choice == "none":
        return ToolUse(shown=None if hide_idle else tools or None)
    must, picked, named = choice == "required", list(by_name), False
    if isinstance(choice, ToolChoice):
        named, allowed = choice.type == "function", choice.allowed_tools
        if named and choice.function is not None:
            must, picked = True, [choice.function.name]
        elif not named and allowed is not None:
            must, picked = allowed.mode == "required", [tool.function.name for tool in allowed.tools]
        else:
            raise InvalidParameter(
                f"tool_choice of type {choice.type!r} needs the field {choice.type!r}.", param="tool_choice"
            )
    for name in picked:
        if name not in by_name:
            raise InvalidParameter(
                f"tool_choice names {shown(name)}, which is not among tools: add the tool there, or name another tool.",
                param="tool_choice",
            )
    if must and not picked:
        raise InvalidParameter("tool_choice requires a call and there are no tools: send tools.", param="tool_choice")
    strict = {tool.function.name for tool in request.tools or () if tool.function.strict}
    callable = {
        name: {"type": "function", "function": by_name[name]["function"] | {"strict": name in strict}}
        for name in picked
    }
    return ToolUse(
        shown=tools or None,
        callable=tuple(callable.values()),
        must=must,
        named=named,
        bound=must or not strict.isdisjoint(picked) or len(callable) < len(by_name),
    )


def plain_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates read them, with fields in the order that models are trained on. Raises 400."""
    plain: dict[str, dict[str, Any]] = {}
    for at, tool in enumerate(tools):
        function = msgspec.to_builtins(tool.function)
        function.pop("strict", None)  # not for the model
        if function.setdefault("parameters", NOTHING).get("type", "object") != "object":
            raise InvalidParameter(
                f'tools[{at}].function.parameters must be the schema of an object ("type": "object").', param="tools"
            )
        if function["name"] in plain:
            raise InvalidParameter(
                f"tools[{at}].function.name: there is another {shown(function['name'])}; give every "
                "function a name of its own.",
                param="tools",
            )
        plain[function["name"]] = {"type": "function", "function": function}
    return list(plain.values())


def plan_parser(
    request: ChatRequest, use: ToolUse, params: SamplingParams, text: TextSide, prompt: Prompt
) -> ParserPlan:
    """Return the plan for parsing the answer to `prompt` (text, ids), and set its grammar in `params`. Raises 400."""
    plan = ParserPlan(
        styles=text.styles,
        tools=use.callable,
        thinking=thinking_at_end(prompt.text or "", text.styles),
        must=use.must,
        named=use.named,
        parallel=request.parallel_tool_calls is not False and not use.named,
        thoughts=request.include_reasoning is not False,
        opened=text.begun_message(prompt.token_ids or ()),
    )
    budget = None if request.thinking_token_budget == NO_BUDGET else request.thinking_token_budget
    params.structured_outputs = held_answer(
        plan, text.tokenizer, params.structured_outputs, bound=use.bound, budget=budget
    )
    params.shown_special_ids = text.tag_ids[bool(use.callable)] or None  # the parser needs the tags in the text
    return plan

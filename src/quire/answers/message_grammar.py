"""Grammars of answers in messages with headers (harmony), in llguidance's Lark syntax.

Reasoning and text before a call stay free: only headers, arguments of calls and the answer itself are held. Special
tokens stand as token ids, which no text matches, so that a free body cannot contain one. The tokens that end the turn
are not in the grammar: they may come where it ends.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.answers.grammar import LAYOUT
from quire.answers.message_parser import MessageParser
from quire.answers.tool_grammar import ANYTHING, arguments_schema, json_rule, terminal
from quire.contracts.errors import InvalidParameter
from quire.contracts.structured import StructuredOutputsParams
from quire.text.detokenizer import detokenizer_for
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import MessageFormat


def message_grammar(
    fmt: MessageFormat,
    tokenizer: Tokenizer,
    opened: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    must: bool = False,
    answer: StructuredOutputsParams | None = None,
) -> StructuredOutputsParams:
    """Make the structured output of a turn in messages.

    opened   last tokens of the prompt, from the last <|start|> on
    tools    OpenAI's tool objects that may be called;  must  True: one of them must be
    answer   structured output that the answer must fit, if the turn has no call; None = any text
    Raises `InvalidParameter` for a grammar as `answer`, and when the prompt has begun a message that cannot be held.
    """
    parser = MessageParser(fmt, tokenizer, detokenizer_for(tokenizer), opened=opened)
    if not parser.in_header and answer is not None and not tools:
        return answer  # the prompt has begun the answer itself
    if not parser.begins_message:
        raise InvalidParameter(
            "tools and structured output cannot be held here, because the prompt has begun a message: "
            "leave continue_final_message out.",
            param="messages",
        )
    token = {kind: f"<[{tokenizer.token_id(text)}]>" for kind, text in msgspec.structs.asdict(fmt.tokens).items()}
    channel, message = token["channel"], token["message"]
    quoted = {name: json.dumps(name) for name in (fmt.role, fmt.thought, fmt.comment, fmt.answer)}
    rules = [
        f"lead: {channel} ({quoted[fmt.thought]} | {quoted[fmt.comment]}) {message} FREE {token['end']} "
        f"{token['start']} {quoted[fmt.role]}",
        f"FREE: {ANYTHING}",
        f'json: " "? {token["constrain"]} "json" | " json"',
    ]
    ways = []
    for at, function in enumerate(tool["function"] for tool in tools):
        to = json.dumps(f" to={fmt.namespace}{function['name']}")
        behind = f"{channel} {quoted[fmt.comment]} {to}"
        before = f"{to} {channel} ({quoted[fmt.comment]} | {quoted[fmt.thought]})"
        rules += [
            f"call{at}: ({behind} | {before}) json? {message} arguments{at}",
            json_rule(f"arguments{at}", *arguments_schema(function)),
        ]
        ways.append(f"call{at}")
    if not must:
        rules += [f"answer: {channel} {quoted[fmt.answer]} json? {message} body", *_body(answer)]
        ways.append("answer")
    return StructuredOutputsParams(grammar="\n".join([f"start: lead* ({' | '.join(ways)})", *rules]))


def _body(answer: StructuredOutputsParams | None) -> list[str]:
    """Return the rules of the answer's text."""
    if answer is None or not answer.given:
        return ["body: FREE"]
    if answer.grammar is not None:
        raise InvalidParameter(
            "structured_outputs.grammar is not implemented for a model that writes its answer in messages: send a JSON "
            "schema, a regex or a choice.",
            param="structured_outputs",
        )
    if answer.regex is not None:
        return ["body: BODY", f"BODY: {terminal(answer.regex)}"]
    if answer.choice is not None:
        if not answer.choice:
            raise InvalidParameter("structured_outputs: choice is empty: send a text.", param="structured_outputs")
        return ["body: BODY", f"BODY: {' | '.join(map(json.dumps, answer.choice))}"]
    schema: Any = {"type": "object"} if answer.json_object else answer.json
    try:
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(
            f"structured_outputs: json is not valid JSON: {error}.", param="structured_outputs"
        ) from None
    if schema is False or not isinstance(schema, dict | bool):
        raise InvalidParameter(
            "structured_outputs: json must be the schema of some text: an object, or true.", param="structured_outputs"
        )
    layout: dict[str, Any] = (
        {"whitespace_flexible": False} if answer.disable_any_whitespace else {"whitespace_pattern": LAYOUT}
    )
    schema = {} if schema is True else schema
    own = schema.get("x-guidance", {})
    return [json_rule("body", schema, {"x-guidance": layout | own if isinstance(own, dict) else own})]

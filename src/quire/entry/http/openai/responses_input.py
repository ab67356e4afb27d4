"""Conversion of a request of the Responses API to a chat request: items become messages. Knows nothing of the store."""

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import TOO_LONG, HttpError, not_implemented
from quire.entry.http.openai.chat import DECODER as CHAT
from quire.entry.http.openai.prompts import chat_prompts, check_parts
from quire.entry.http.openai.responses_schema import Item, ResponseRequest
from quire.entry.http.openai.sampling import structured
from quire.entry.http.openai.schema import MAX_MESSAGES, ChatRequest, SamplingFields
from quire.entry.http.openai.to_chat_messages import Talk
from quire.entry.http.request_response import Exchange
from quire.text.sandbox import TextTooLong

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
SYSTEM, SCHEMA = ("system", "developer"), "json_schema"
NEEDS = {
    None: "role and content, or a type",
    "message": "role and content",
    "function_call": "call_id and name",
    "function_call_output": "output, and as call_id that of a function_call before it: send that call, too, or "
    "the previous_response_id of the response that made it",
}


def check_fields(request: ResponseRequest) -> None:
    """Raise 400 for fields that are not implemented, or not in this combination."""
    asked = request.include or ()
    for at, kind in enumerate(tool.get("type") for tool in request.tools or ()):
        if kind != "function":
            raise not_implemented(f"tools[{at}]: {shown(kind)}", "the server runs no tools; send functions.", "tools")
    for name in set(asked) - {LOGPROBS, ENCRYPTED}:
        raise not_implemented(
            f"include: {shown(name)}", "it belongs to a tool that the server does not run; leave it out.", "include"
        )
    if request.top_logprobs and LOGPROBS not in asked:
        raise InvalidParameter(f'top_logprobs needs include=["{LOGPROBS}"].', param="top_logprobs")
    if request.background and request.store is False:
        raise InvalidParameter("background needs store=true: the response is retrieved later.", param="background")


def chat_request(request: ResponseRequest, earlier: Iterable[Item], items: Iterable[Item]) -> ChatRequest:
    """Convert a request to a chat: instructions, items of earlier responses, the request's own items. Raises 400."""
    talk = Talk()
    if request.instructions:
        talk.say(request.instructions, "system")
    for item in earlier:
        _add(talk, item, "previous_response_id: an item")
    for at, item in enumerate(items):
        _add(talk, item, f"input[{at}]")
    if not talk.messages and not request.input:
        raise InvalidParameter(
            f"input is {'missing' if request.input is None else 'empty'}: it must be a text, or a list of items.",
            param="input",
        )
    if not 0 < len(talk.messages) <= MAX_MESSAGES:
        raise InvalidParameter(
            f"input makes a conversation of {len(talk.messages)} messages: it must have 1 to {MAX_MESSAGES}.",
            param="input",
        )
    if request.kv_transfer_params:
        raise InvalidParameter("kv_transfer_params: use /v1/chat/completions.", param="kv_transfer_params")
    logprobs, choice = LOGPROBS in (request.include or ()), request.tool_choice
    rest = {"type": "text"} if request.text is None else {**request.text.format}
    kind = rest.pop("type", None)
    try:
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            tools = choice.get("tools")
            tools = [*map(_nested, tools)] if isinstance(tools, list) else tools
            choice = {"type": "allowed_tools", "allowed_tools": {**choice, "tools": tools}}
        return msgspec.convert(
            {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
            | {
                "messages": talk.messages,
                "max_completion_tokens": request.max_output_tokens,
                "stream_options": None,
                "logprobs": logprobs,
                "top_logprobs": (request.top_logprobs or 0) if logprobs else None,
                "response_format": {"type": kind, "json_schema": rest} if kind == SCHEMA else {"type": kind, **rest},
                "reasoning_effort": request.reasoning and request.reasoning.effort,
                "tools": [*map(_nested, request.tools or ())],
                "parallel_tool_calls": request.parallel_tool_calls,
                "tool_choice": _nested(choice)
                if isinstance(choice, dict) and "allowed_tools" not in choice
                else choice,
                "chat_template_kwargs": request.chat_template_kwargs,
            },
            ChatRequest,
        )
    except msgspec.ValidationError as error:
        raise CHAT.explain(str(error)) from error


def _nested(tool: Any) -> Any:
    return {"type": tool.get("type"), "function": tool} if isinstance(tool, dict) else tool


def _add(talk: Talk, item: Item, where: str) -> None:
    """Add an item. Raises 400 for an unknown type or a missing field."""
    given = item.output if item.type == "function_call_output" else item.content
    check_parts(given if item.type in NEEDS else None, where, "input")
    if item.type in (None, "message") and item.role and given is not None:
        # Successive system and developer messages are merged, since templates accept only one.
        others = SYSTEM if item.role in SYSTEM else ()
        talk.say(given, item.role, *others, joined=item.role in (*SYSTEM, "assistant"))
    elif item.type == "function_call_output" and item.call_id in talk.called and given is not None:
        talk.answer(item.call_id, given)
    elif item.type == "function_call" and item.call_id and item.name:
        talk.call(item.call_id, item.name, item.arguments or "{}")
    elif item.type == "reasoning":
        parts = item.content or item.summary or ()
        talk.think(parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts))
    elif item.type in NEEDS:
        raise InvalidParameter(f"{where} needs {NEEDS[item.type]}.", param="input")
    else:
        raise not_implemented(
            f"{where}: {shown(item.type)}",
            f"send items of type {', '.join(filter(None, NEEDS))} or reasoning.",
            "input",
        )


async def fitting(context: ServerContext, exchange: Exchange, chat: ChatRequest) -> ChatRequest:
    """Return the chat without its oldest turns, so that it fits the context.
    A binary search finds the number of turns to drop. The system message at the beginning and the last turn stay."""
    messages, head = chat.messages, int(chat.messages[0].role in SYSTEM)
    cuts = [head, *(at for at in range(head + 1, len(messages)) if messages[at].role == "user")]
    low, high, tried = 0, len(cuts) - 1, 0
    while low < high:
        shorter = msgspec.structs.replace(chat, messages=[*messages[:head], *messages[cuts[tried] :]])
        try:
            await chat_prompts(context, exchange, shorter, SamplingParams(structured_outputs=structured(chat)))
            high = tried
        except (HttpError, TextTooLong) as error:
            if isinstance(error, HttpError) and error.code != TOO_LONG:
                raise
            low = tried + 1
        tried = (low + high) // 2
    return msgspec.structs.replace(chat, messages=[*messages[:head], *messages[cuts[low] :]])

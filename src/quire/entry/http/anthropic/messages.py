"""POST /v1/messages: the next message of a conversation in Anthropic's format. /v1/messages/count_tokens: the length of
its prompt. Both are converted to a chat request of the OpenAI routes. Unsupported fields are refused by name."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from quire.answers.answer_events import CallArguments, CallBegins, Event, Thought, Words
from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.entry.http.anthropic.errors import anthropic_error
from quire.entry.http.anthropic.schema import Block, Content, InputMessage, MessagesRequest
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import not_implemented
from quire.entry.http.openai import decode, generate, prompts, sampling, schema, tools
from quire.entry.http.openai.to_chat_messages import Talk
from quire.entry.http.request_response import Exchange
from quire.text.tokenizer import Tokenizer

DECODER, ENCODE = (
    decode.RequestDecoder(MessagesRequest, refused="../anthropic/refused_fields.txt"),
    msgspec.json.Encoder().encode,
)
WORDS = (
    (r"(?<=\])\.function\.parameters\b", ".input_schema"),
    (r"(?<=\])\.function\b", ""),
    (r"\bresponse_format(\.json_schema)?\b", "output_config.format"),
    (r"\bstop(?==| must)", "stop_sequences"),
    (r"\breasoning_effort\b", "output_config.effort"),
)
CALL_PREFIX = "toolu_"  # added to call ids in answers, removed from those in requests, since templates show ids
BLOCKS = {  # role -> block type -> required fields
    "system": {"text": ("text",)},
    "user": {"text": ("text",), "tool_result": ("tool_use_id",)},
    "assistant": {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
    },
}
CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
SHOWN: dict[type[Event], tuple[dict[str, Any], str, str]] = {  # event -> (empty block, type and field of its delta)
    Words: ({"type": "text", "text": ""}, "text_delta", "text"),
    Thought: ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    CallBegins: ({"type": "tool_use", "input": {}}, "", ""),
    CallArguments: ({"type": "tool_use"}, "input_json_delta", "partial_json"),
}


async def messages(context: ServerContext, exchange: Exchange) -> None:
    """Answer a request of /v1/messages. `max_tokens` may exceed the context; the answer ends at the context's end."""
    exchange.ending = lambda *error: b"event: error\ndata: %b\n\n" % anthropic_error(*error, exchange.request_id)[1]
    request = await DECODER.read(context, exchange)
    exchange.words = WORDS
    if (longest := request.max_tokens) is None:
        raise InvalidParameter("max_tokens is missing: it must be an integer >= 0.", param="max_tokens")
    await generate.answer(
        context,
        exchange,
        _chat_request(context, exchange, request),
        lambda asked, defaults, interval: sampling.sampling_params(
            asked, defaults, max_tokens=longest, logprobs=None, stream_interval=interval
        ),
        prompts.chat_prompts,
        lambda job, _, tokenizer: MessageWriter(job, longest, tokenizer),
    )


async def count_tokens(context: ServerContext, exchange: Exchange) -> None:
    """Answer with the number of prompt tokens of a request, even if the context cannot hold them."""
    given = await DECODER.read(context, exchange)
    exchange.words = WORDS
    request = _chat_request(context, exchange, given)
    await context.find(request.model, exchange.scope)
    use = tools.tool_use(request, hide_idle=context.config.serve.exclude_tools_when_tool_choice_none)
    held = request.response_format is not None or request.thinking_token_budget is not None
    opens = context.text().styles.reasoning if held else None
    prompt = await prompts.conversation_prompt(
        context, exchange, request, request.messages, None, tools=use.shown, opens=opens
    )
    await exchange.reply(ENCODE({"input_tokens": len(prompt.token_ids or ())}))


def _chat_request(context: ServerContext, exchange: Exchange, request: MessagesRequest) -> schema.ChatRequest:
    """Convert a request to OpenAI's format, without `max_tokens`. Raises 400."""
    talk = Talk()
    if request.system:
        _add(talk, InputMessage(role="system", content=request.system), "system")
    for at, message in enumerate(request.messages):
        _add(talk, message, f"messages[{at}].content")
    open_end, last = request.messages[-1].role == "assistant", talk.messages[-1]
    if open_end and (last.tool_calls or not last.content):
        raise InvalidParameter(
            "the last message is the assistant's, and the answer continues it: give it text and no tool_use.",
            param="messages",
        )
    for at, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise not_implemented(
                f"tools[{at}]: {shown(tool.type)}",
                "the server runs no tools; define your own with an input_schema.",
                "tools",
            )
    given: dict[str, Any] = {}
    if (config := request.output_config) is not None:
        given["reasoning_effort"] = config.effort
        if config.format is not None:
            given["response_format"] = schema.ResponseFormat(
                type="json_schema", json_schema=schema.JsonSchema(schema=config.format.schema)
            )
    if (choice := request.tool_choice) is not None:
        if choice.type == "tool" and not choice.name:
            raise InvalidParameter("tool_choice.name is missing: send the name of the tool.", param="tool_choice")
        named = schema.ToolChoice(type="function", function=schema.FunctionReference(name=choice.name or ""))
        given["tool_choice"] = CHOICES.get(choice.type, named)
        given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (thinking := request.thinking) is not None:
        given["include_reasoning"] = thinking.display != "omitted"
        given["thinking_token_budget"] = thinking.budget_tokens if thinking.type == "enabled" else None
        if (template := context.text().chat_template) is not None and "enable_thinking" in template.source():
            given["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
        else:
            exchange.warn(f"thinking.type {thinking.type} is ignored: the chat template does not read enable_thinking")
    return schema.ChatRequest(
        **given,
        model=request.model,
        messages=talk.messages,
        continue_final_message=open_end,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        stream=request.stream,
        tools=[
            schema.Tool(
                type="function",
                function=schema.FunctionSpec(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            )
            for tool in request.tools or ()
        ],
    )


def _add(talk: Talk, message: InputMessage, where: str) -> None:
    """Add a message. It is merged with the message before if both have the same role. Tool results stay separate."""
    if message.role == "assistant":
        talk.say([], message.role)
    for block in _blocks(message.content, where, message.role):
        call_id = (block.tool_use_id or block.id or "").removeprefix(CALL_PREFIX)
        if block.type == "tool_result":
            parts = [*map(_part, _blocks(block.content or "", f"{where}: the content of a tool_result", "system"))]
            parts[0].text = ("Error: " if block.is_error else "") + (parts[0].text or "")
            talk.answer(call_id, parts)
        elif block.type == "tool_use":
            talk.call(call_id, block.name or "", block.input)
        elif block.type == "text":
            talk.say([_part(block)], message.role)
        else:  # thinking; redacted thinking has no readable text, and only the turn remains
            talk.think(block.thinking or "")


def _part(block: Block) -> schema.ContentPart:
    """Return a text block as a content part of OpenAI's format."""
    return schema.ContentPart(type="text", text=block.text or "", kv_chunk=block.kv_chunk)


def _blocks(content: Content, where: str, role: str) -> Iterator[Block]:
    """Yield the blocks of a content. Raises 400 for an unknown type or a missing field."""
    if content == [] and role != "assistant":  # an answer may end before its first block
        raise InvalidParameter(f"{where} is an empty list: give at least one block.", param="messages")
    for at, block in enumerate([Block(type="text", text=content)] if isinstance(content, str) else content):
        needs = BLOCKS[role].get(block.type)
        if needs is None:
            read = f"use {', '.join(BLOCKS[role])}."
            raise not_implemented(f"{where}[{at}]: {shown(block.type)}", read, where)
        for name in needs:
            if getattr(block, name) is None:
                raise InvalidParameter(f"{where}[{at}].{name} is missing: a {block.type} block needs it.", param=where)
        yield block


class MessageWriter(generate.Writer):
    """Writer of answers of /v1/messages: content blocks, as one JSON message or as the events of a stream."""

    def __init__(self, job: generate.Job, max_tokens: int, tokenizer: Tokenizer | None) -> None:
        self._parsers, self._max_tokens = job.parsers(tokenizer), max_tokens
        self._message = {
            "id": f"msg_{job.request_id}",
            "type": "message",
            "role": "assistant",
            "model": job.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._index, self._open, self._called = -1, "", False  # the open block's number and type; True after a call
        self._last: CompletionOutput

    def begin(self, prompt: int, output: RequestOutput, usage: bytes = b"") -> bytes:
        """Return the events that start an empty message."""
        counts = _counts(generate.usage(len(output.prompt_token_ids), 0, output.num_cached_tokens or 0))
        return _frames({"type": "message_start", "message": {**self._message, "usage": counts}}, {"type": "ping"})

    def piece(self, choice: int, piece: CompletionOutput, usage: bytes) -> bytes:
        """Return the events of new text: blocks that start, grow and stop."""
        return _frames(*self._news(piece))

    def end(self, usage: schema.Usage) -> bytes:
        """Return the last events: the stop reason and the token counts."""
        delta = {"type": "message_delta", "delta": self._stop(usage), "usage": _counts(usage)}
        return _frames(delta, {"type": "message_stop"})

    def whole(self, outputs: list[RequestOutput], usage: schema.Usage) -> bytes:
        """Return the whole message as JSON. Its content equals the joined events of a stream."""
        blocks: list[dict[str, Any]] = []
        for news in self._news(outputs[0].outputs[0]):
            if "content_block" in news:
                blocks.append(dict(news["content_block"]))
            elif "delta" in news:
                _, (field, text) = news["delta"].items()
                blocks[-1][field] = blocks[-1].get(field, "") + text
        for block in blocks:
            with suppress(msgspec.DecodeError):  # a call that was cut off has no input
                if (arguments := block.pop("partial_json", None)) is not None:
                    block["input"] = msgspec.json.decode(arguments, type=dict)
        usage.completion_tokens_details.reasoning_tokens = self.num_thought
        return ENCODE({**self._message, "content": blocks, **self._stop(usage), "usage": _counts(usage)})

    def _news(self, piece: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the stream events of a piece."""
        self._last = piece
        for event in self._parsers[0].events(piece):
            block, delta, field = SHOWN[type(event)]
            if block["type"] != self._open or isinstance(event, CallBegins):
                if self._open:
                    yield {"type": "content_block_stop", "index": self._index}
                self._index, self._open = self._index + 1, block["type"]
                if isinstance(event, CallBegins):
                    self._called, block = True, block | {"id": CALL_PREFIX + event.call_id, "name": event.name}
                yield {"type": "content_block_start", "index": self._index, "content_block": block}
            if not isinstance(event, CallBegins):
                yield {"type": "content_block_delta", "index": self._index, "delta": {"type": delta, field: event.text}}
        if piece.finish_reason is not None and self._open:
            yield {"type": "content_block_stop", "index": self._index}

    def _stop(self, usage: schema.Usage) -> dict[str, str | None]:
        """Return the stop reason, and the stop sequence if there was one."""
        reason, word = "tool_use" if self._called else "end_turn", self._last.stop_reason
        if self._last.finish_reason == "length":
            cut = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if cut else "max_tokens"
        return (
            {"stop_reason": "stop_sequence", "stop_sequence": word}
            if isinstance(word, str)
            else {"stop_reason": reason, "stop_sequence": None}
        )


def _counts(usage: schema.Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
    }


def _frames(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), ENCODE(event)) for event in events)

"""Types of the Messages API, with ranges: one source for decoding and for the OpenAPI document.
`cache_control` has no effect anywhere: every prompt is looked up in the prefix cache."""

from typing import Annotated, Any, Literal

import msgspec

from quire.entry.http.openai.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    Count,
    Effort,
    FunctionName,
    Share,
)


class Block(msgspec.Struct, kw_only=True):
    """A part of a message: text, thinking, tool_use (id, name, input), tool_result (tool_use_id, content, is_error).
    `kv_chunk`: of a text, for CacheBlend."""

    type: str
    text: str | None = None
    kv_chunk: bool | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "Content | None" = None
    is_error: bool | None = None


Content = str | Annotated[list[Block], msgspec.Meta(max_length=MAX_PARTS)]


class InputMessage(msgspec.Struct, kw_only=True):
    """A message. Successive messages of one role are merged. If the last is an assistant's, the answer continues it."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call. `strict`: the input is forced to fit the schema."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolPick(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Choice of tools: auto (the model decides), any (at least one call), tool (the one with this name), or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking before the answer: on or off (if the chat template has a switch), its token budget and its display."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """JSON schema of the answer. `name` is accepted, as in OpenAI's API, and has no effect."""

    type: Literal["json_schema"]
    schema: dict[str, Any] | bool
    name: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning effort, if the chat template reads it, and the format of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Request body of /v1/messages, where `max_tokens` is required, and of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    system: Content | None = None
    tools: Annotated[list[CustomTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolPick | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of a message. `input_tokens` does not include tokens read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(msgspec.Struct, kw_only=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int

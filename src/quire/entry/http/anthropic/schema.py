"""Requests of the Messages API as types, with their ranges: one source for decoding and the OpenAPI text.
`cache_control`, wherever a request has it, changes nothing: every prompt is looked up in the prefix cache."""

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
    """A part of a message: text, thinking, tool_use (id, name, input), tool_result (tool_use_id, content, is_error)."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "Content | None" = None
    is_error: bool | None = None


Content = str | Annotated[list[Block], msgspec.Meta(max_length=MAX_PARTS)]


class InputMessage(msgspec.Struct, kw_only=True):
    """One message; those of one role in a row are one. A last one of the assistant is continued by the answer."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(msgspec.Struct, kw_only=True):
    """Something that the model may call. `strict`: an input that does not fit the schema is impossible."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolPick(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which tool: as the model likes, any of them, the one with this name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks first, where its template has a switch for that, and whether its thoughts are shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema that an answer fits; one with a name, as other APIs have it, is as good."""

    type: Literal["json_schema"]
    schema: dict[str, Any] | bool
    name: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How hard the model thinks, where its template reads that, and the schema that its answer fits."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages, which needs `max_tokens` and ends an answer with the context, and .../count_tokens."""

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
    """Token counts of a message; those from the cache are not among `input_tokens`."""

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

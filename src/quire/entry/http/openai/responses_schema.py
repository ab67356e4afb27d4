"""Types of OpenAI's Responses API. Clients may send items of an answer back as items of input."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.entry.http.openai.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ContentPart,
    Effort,
    Logprobs,
    SamplingFields,
)

MAX_METADATA = 16
Key = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[Key, Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)]
Parts = Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]
Items = Annotated[list["Item"], Meta(max_length=MAX_MESSAGES)]


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An input or output item of the API, such as a message or a tool call. Without `type` it is a message."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | Parts | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """The field `text` of a request: format of the answer. `verbosity` has no effect."""

    format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The field `reasoning` of a request. With `summary`, the summary in the answer is the whole reasoning."""

    effort: Effort | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseRequest(SamplingFields, kw_only=True):
    """POST /v1/responses, with the sampling fields of the other routes.

    previous_response_id   begin with the items of that response and of those before it, without their instructions
    truncation             "auto": leave out the oldest turns of a conversation that does not fit the context
    background             answer before the generation ends; the client retrieves the response later
    store                  store the response (default: true)
    max_tool_calls         no effect: it limits tools that the server runs, and there are none
    """

    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """Answer of /v1/responses, with most fields of its request. `output`: items like those of `input`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None

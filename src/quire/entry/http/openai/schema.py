"""The OpenAI API as types: requests with their ranges, and answers. Used for decoding and for the OpenAPI document.

Ranges follow OpenAI's specification. Further fields are those that clients of other open engines send. Every optional
field may be null, which means "not given". Defaults are not here: the server has them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.contracts.output import LogprobsByToken
from quire.contracts.sampling import MAX_LOGPROB_IDS

MAX_CHOICES = 128  # completions of one request, of all its prompts together
MAX_PROMPTS = 1_024  # prompts of one request with n=1: evaluation harnesses send whole data sets
MAX_STOPS = 64  # OpenAI allows 4; evaluation harnesses send more
MAX_SALT = 256
MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # of one message
MAX_STOP_IDS = 1_024
MAX_ALLOWED_IDS = 2**18  # more than any vocabulary has
MAX_BIASES = 1_024  # OpenAI allows 300
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD = 256  # characters
MAX_TOOLS = 512  # OpenAI allows 128
MAX_CHOICE_TEXTS = 10_000  # of a structured output

TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
BadWord = Annotated[str, Meta(max_length=MAX_BAD_WORD)]
Messages = Annotated[list["Message"], Meta(min_length=1, max_length=MAX_MESSAGES)]
Logprobs = Annotated[int, Meta(ge=-1)]
Tools = Annotated[list["Tool"], Meta(max_length=MAX_TOOLS)]
# OpenAI allows 64 letters, digits, "_" and "-". MCP servers use dots and slashes in names, gateways add colons.
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./:-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FinishReason = str

# --- requests -------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream.

    include_usage            send one more event at the end, with the token counts
    continuous_usage_stats   send the token counts so far in every event
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema with a name. It is always enforced; `strict` has no effect."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the answer: free text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Structured output: exactly one of json, regex, choice, grammar, json_object. See `StructuredOutputsParams`."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=MAX_CHOICE_TEXTS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """Fields of every request whose prompt or texts the engine computes.

    truncate_prompt_tokens   keep this many tokens of the prompt (its end, unless truncation_side is "right"); -1: as
                             many as the context holds
    cache_salt               prompts share cached KV blocks only with prompts of the same salt
    """

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: str | None = None


class SamplingFields(PromptFields, kw_only=True):
    """Fields of every request for text. Fields that are not explained have the meaning of `SamplingParams`.

    response_format, structured_outputs   two ways to set the format of the answer
    return_token_ids         also return the token ids of prompt and text
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Logprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_IDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_reading_prefix_cache: bool | None = None
    speculative_tokens: Count | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_chunks: Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_LOGPROB_IDS)] | None = None
    blend_ratio: Share | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions.

    prompt   a text, several texts, token ids, or several lists of token ids
    prompt_embeds   base64 of a file of torch.save, or several: tensors [tokens, hidden], with a prompt "" or null
    suffix   text after the answer (fill in the middle)
    """

    prompt: str | list[str | int | list[int]] | None
    prompt_embeds: str | Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message. Only text is read; a refusal of the assistant counts as text. kv_chunk: for CacheBlend."""

    type: str
    text: str | None = None
    refusal: str | None = None
    kv_chunk: bool | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function call of the assistant. `arguments`: JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A past tool call of the assistant."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a conversation. Earlier reasoning is in `reasoning` or `reasoning_content`.
    `role`: system, developer, user, assistant, tool, or another that the chat template knows."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    images: Any = None
    prefix: bool | None = None


class FunctionSpec(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call.

    parameters   JSON schema of an object; none = no parameters
    strict       force the arguments to fit the schema
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionReference(msgspec.Struct, kw_only=True):
    """Name of a function among the request's tools."""

    name: str


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools of the request that may be called now. With mode "required" the model must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list["Tool"], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Choice of tools: a `function` that must be called, or `allowed_tools`."""

    type: Literal["function", "allowed_tools"]
    function: FunctionReference | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions. `max_completion_tokens` overrides `max_tokens`.

    continue_final_message   leave the last message open and continue it; add_generation_prompt is then off by default
    chat_template            template instead of the model's, on a server with --trust-request-chat-template
    chat_template_kwargs     variables of the chat template, such as enable_thinking
    echo                     with continue_final_message: the answer begins with the message that it continues
    parallel_tool_calls      false: the answer has at most one tool call
    include_reasoning        false: the reasoning is not returned
    thinking_token_budget    maximum tokens of reasoning, if the rendered prompt opens the reasoning; -1: no limit
    """

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    include_reasoning: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    tools: Tools | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize: the text of `tokens`. Special tokens are shown unless `skip_special_tokens` is true."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


# --- answers --------------------------------------------------------------------------------------------------------


class CachedTokens(msgspec.Struct, kw_only=True):
    """Tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokens(msgspec.Struct, kw_only=True):
    """Tokens of the completions that were reasoning; with speculative decoding also its drafts, right and wrong."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens_per_pos: list[int] | msgspec.UnsetType = msgspec.UNSET  # first of a run, second, ...


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request, of all its choices. Each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class LegacyLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of /v1/completions by token; those of an echoed first token are null. `text_offset`: in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion; index = prompt index * n + number of the completion. Token ids and prompt logprobs are optional."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[LogprobsByToken | None] | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token and its log-probability. `bytes`: its bytes, since a token may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TokenLogprob, kw_only=True):
    """A generated token, with the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of an answer, token by token."""

    content: list[ChatLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Message of the model. `content` is null if there are only tool calls. `reasoning_content` repeats `reasoning`."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """An answer. `token_ids` is sent only on request."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prompt_logprobs: list[LogprobsByToken | None] | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model. `root`: the loaded model; `max_model_len`: tokens of context, null while it loads."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Answer of /tokenizer_info, with which a client can count tokens and render chats itself.
    `tokenizer_class`: name of the class in transformers."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    vocab_size: int
    chat_template: str | None


class ErrorDetail(msgspec.Struct, kw_only=True):
    """An error. `param` names the field; `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every error response."""

    error: ErrorDetail

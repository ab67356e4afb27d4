"""Conversion of texts, token ids and conversations to prompts with token ids. Long ones leave the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec

from quire.answers.choice_parser import ParserPlan
from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.sampling import SamplingParams
from quire.entry.http.access.keyring import client_of
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import TOO_LONG, HttpError, not_implemented, too_long
from quire.entry.http.openai.sampling import check_choices
from quire.entry.http.openai.schema import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Message,
    PromptFields,
    TokenizeRequest,
)
from quire.entry.http.openai.tools import plan_parser, tool_use
from quire.entry.http.request_response import Exchange
from quire.entry.http.text_work import LONG
from quire.entry.prompts import Prompt, piece_prompt
from quire.text.chat import ARGUMENTS, SWITCHES, TEXT_PARTS, ChatTemplate
from quire.text.fill_in_middle import around_gap
from quire.text.kv_chunk_marks import MarkedParts
from quire.text.load import TextSide
from quire.text.output_styles import check_variables, effort_variables
from quire.text.sandbox_meter import TooCostly
from quire.text.special import SpecialTokens
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import ReasoningFormat

IDS = r"^prompt_token_ids(?= holds|$)"  # the engine's name for ids, which a route replaces by its field's
T = TypeVar("T")


async def away(context: ServerContext, exchange: Exchange, work: Callable[[], T], size: int | None = None) -> T:
    """Run `work`, a computation on the texts of a request, and return its result. Long ones run in threads, whose time
    clients share: see `TextWork`. `size`: bytes of the texts (default: of the request). Raises `QueueFull`."""
    text, size = context.engine.text, exchange.size if size is None else size
    growth = 1.0 if text is None or text.tokenizer is None else text.tokenizer.growth
    try:
        return await context.text_work.run(client_of(exchange.scope), int(size * growth), work)
    finally:
        if size >= LONG:
            context.memory.count(size)


def tokenizer_of(text: TextSide, param: str) -> Tokenizer:
    """Return the tokenizer. Raises 400 if the server runs without one."""
    if text.tokenizer is None:
        raise InvalidParameter(
            "this server has no tokenizer (skip_tokenizer_init): use /v1/completions with token ids.", param=param
        )
    return text.tokenizer


async def spell_bad_words(context: ServerContext, exchange: Exchange, params: SamplingParams) -> None:
    """Tokenize the bad words now, in a thread if needed. The tokenizer caches the result for the front end.
    Raises 400 for a word without tokens."""
    words, tokenizer = params.bad_words, context.text().tokenizer
    if words and tokenizer is not None:
        await away(context, exchange, lambda: tokenizer.bad_word_ids(words))


async def completion_prompts(
    context: ServerContext, exchange: Exchange, request: CompletionRequest, params: SamplingParams
) -> tuple[list[Prompt], ParserPlan]:
    """Make the tokenized prompts of /v1/completions, truncated as asked. The plan parses the answer as plain text."""
    if request.prompt is None:
        raise InvalidParameter("prompt is null: send a text or token ids.", param="prompt")
    given = several(request.prompt)
    check_choices(len(given), request)
    longest = longest_prompt(context, request)
    texts = [item for item in given if isinstance(item, str)]
    after = request.suffix or ""
    for name in ("echo", "truncate_prompt_tokens") if after else ():
        if getattr(request, name):
            raise InvalidParameter(f"suffix excludes {name}: leave one of them out.", param="suffix")
    if texts:
        tokenizer, special = tokenizer_of(context.text(), "prompt"), request.add_special_tokens is not False
        prompts = await away(
            context,
            exchange,
            lambda: [encoded(tokenizer, [[text]], special, longest, "prompt", after=after) for text in texts],
        )
    elif after:
        raise InvalidParameter(
            "suffix needs a prompt that is a text: with token ids, write the model's "
            "fill-in-the-middle tokens yourself.",
            param="suffix",
        )
    else:
        prompts = [Prompt(token_ids=item) for item in given if not isinstance(item, str)]
    return [fitted(context, request, prompt, request.max_tokens, "prompt") for prompt in prompts], ParserPlan()


async def chat_prompts(
    context: ServerContext, exchange: Exchange, request: ChatRequest, params: SamplingParams
) -> tuple[list[Prompt], ParserPlan]:
    """Make the tokenized prompt of a conversation, truncated as asked, and the plan for parsing its answer."""
    check_choices(1, request)
    longest = longest_prompt(context, request)
    use = tool_use(request, hide_idle=context.config.serve.exclude_tools_when_tool_choice_none)
    text, template = context.text(), _own_template(context, request) or context.text().chat_template
    if (
        use.callable
        and template is not None
        and ("tools" not in template.source(tools=True) or text.parsers[0] == "none")
    ):
        raise InvalidParameter(
            "the model cannot be given tools: its chat template does not use them, or the server "
            'runs with --tool-call-parser none. Send tool_choice="none", or start the server with '
            "another --chat-template.",
            param="tools",
        )
    # A grammar applies after reasoning, a thinking budget within it: for both the prompt must decide if there is any.
    bounded = request.thinking_token_budget is not None
    opens = text.styles.reasoning if params.structured_outputs is not None or bounded else None
    prompt = await conversation_prompt(
        context, exchange, request, request.messages, longest, tools=use.shown, opens=opens
    )
    plan = plan_parser(request, use, params, text, prompt)
    if bounded and not plan.thinking:
        exchange.warn("thinking_token_budget has no effect here: the prompt begins no reasoning")
    if (asked := request.max_completion_tokens) is not None:
        return [fitted(context, request, prompt, asked, "messages", "max_completion_tokens")], plan
    return [fitted(context, request, prompt, request.max_tokens, "messages")], plan


async def conversation_prompt(
    context: ServerContext,
    exchange: Exchange,
    request: ChatRequest | TokenizeRequest,
    messages: list[Message],
    longest: int | None,
    *,
    tools: list[dict[str, Any]] | None = None,
    opens: ReasoningFormat | None = None,
) -> Prompt:
    """Render messages with the chat template and tokenize the text. The template writes the special tokens.

    longest   maximum tokens of the prompt; None = no limit
    opens     reasoning format whose start tag the prompt gets, if the model would write the tag itself; None = no tag
    """
    text = context.text()
    tokenizer = tokenizer_of(text, "messages")
    template = _own_template(context, request) or text.chat_template
    if template is None:
        raise InvalidParameter(
            f"{context.model_names[0]} has no chat template (it is probably a base model): use "
            "/v1/completions, or start the server with --chat-template.",
            param="messages",
        )
    variables = _variables(exchange, template, request, context.config.serve.default_chat_template_kwargs)
    check_variables(text.styles, variables)
    special, open_end = bool(request.add_special_tokens), bool(request.continue_final_message)
    generation = not open_end if request.add_generation_prompt is None else request.add_generation_prompt
    marked = MarkedParts(context.ready().blends, text.styles.turn_tokens)

    def render(how: Callable[..., str]) -> str:
        def once(**more: Any) -> str:
            plain = marked.mark(_plain_messages(messages, template))
            return how(
                plain,
                tools=tools,
                add_generation_prompt=generation,
                continue_final_message=open_end,
                **variables | more,
            )

        rendered = once()
        return rendered if opens is None else rendered + _opening(rendered, once(enable_thinking=False), opens)

    def encode(rendered: str) -> Prompt:
        return encoded(tokenizer, marked.pieces(rendered), special, longest, "messages")

    try:
        return await away(context, exchange, lambda: encode(render(template.render_here)))
    except TooCostly:
        over = Future[None]()
        try:
            async with exchange.watch(), context.sandbox():
                rendered = await asyncio.to_thread(
                    render, lambda given, /, **more: template.render_apart(given, over, **more)
                )
        finally:  # ends the thread and its child process if the client has disconnected
            over.set_result(None)
        return await away(context, exchange, lambda: encode(rendered), len(rendered))


def _opening(prompt: str, without: str, row: ReasoningFormat) -> str:
    """Return the text that begins the reasoning, for a model that begins it by itself; else "".
    It is found in the prompt `without` reasoning, where the template writes an empty reasoning: begin and end. Returns
    "" also when the prompt has begun the reasoning already."""
    added = without.removeprefix(prompt) if without.startswith(prompt) else ""
    before, start, after = added.partition(row.start)
    return before + start if row.end in after else ""


def _own_template(context: ServerContext, request: ChatRequest | TokenizeRequest) -> ChatTemplate | None:
    """Return the chat template of a request; None without one. Raises 400 if the server accepts no templates."""
    if request.chat_template is None:
        return None
    if not context.config.http.trust_request_chat_template:
        raise HttpError(
            400,
            "chat_template: this server uses only its own template: leave the field out, or start the "
            "server with --trust-request-chat-template.",
            code="unsupported_parameter",
            param="chat_template",
        )
    text = context.text()
    model = text.chat_template or ChatTemplate({}, SpecialTokens.read(text.tokenizer_folder).named)
    return model.replaced(request.chat_template)


def longest_prompt(context: ServerContext, request: PromptFields) -> int | None:
    """Return the maximum number of prompt tokens; None if a longer prompt is truncated."""
    return context.ready().max_model_len if request.truncate_prompt_tokens is None else None


def encoded(
    tokenizer: Tokenizer, pieces: list[list[str]], special: bool, longest: int | None, param: str, *, after: str = ""
) -> Prompt:
    """Tokenize a text in pieces, see `MarkedParts`; with `after`, fill the gap between the text and it.
    `special`: add special tokens such as BOS. Raises 400 for the field `param`, before it tokenizes, when the text
    certainly has more than `longest` tokens."""
    text = "".join(map("".join, pieces))
    if longest is not None and (fewest := tokenizer.fewest_tokens(text + after)) > longest:
        words = f"this model's maximum context length is {longest} tokens, and the prompt is too long with at least"
        raise HttpError(400, f"{words} {fewest}: shorten the prompt.", code=TOO_LONG, param=param)
    if after:
        return Prompt(token_ids=around_gap(tokenizer, text, after, special))
    return piece_prompt(tokenizer, pieces, special)


def several(prompt: str | Sequence[str | int | list[int]], param: str = "prompt") -> list[str | list[int]]:
    """Return a list of prompts from one text, several texts, token ids, or several lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameter(f"{param} is an empty list: give at least one text or token id.", param=param)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds == {str} or kinds == {list}:
        return cast(list[str | list[int]], prompt)
    raise InvalidParameter(
        f"{param} mixes texts, token ids and lists: give a text, a list of texts, token ids, or a "
        "list of lists of ids.",
        param=param,
    )


def fitted(
    context: ServerContext,
    request: PromptFields,
    prompt: Prompt,
    asked: int | None,
    param: str,
    limit: str = "max_tokens",
) -> Prompt:
    """Return the prompt with the request's cache salt, truncated if the request has `truncate_prompt_tokens`.
    Raises 400 when the prompt and `asked` output tokens exceed the context; `param` and `limit` are their fields."""
    ids, longest, keep = prompt.token_ids or [], context.ready().max_model_len, request.truncate_prompt_tokens
    text, chunks = prompt.text, prompt.chunks
    if keep is not None:
        keep = keep if keep >= 0 else max(longest - (1 if asked is None else asked), 1)
        if len(ids) > keep:
            cut = 0 if request.truncation_side == "right" else len(ids) - keep  # tokens that go before the others
            ids, text = ids[cut : cut + keep], None
            chunks = tuple(
                (max(first - cut, 0), min(end - cut, keep)) for first, end in chunks if cut < end and first < cut + keep
            )
    if not ids:
        raise InvalidParameter("the prompt is empty: give at least one token.", param=param)
    if len(ids) + (1 if asked is None else asked) > longest:
        raise too_long(len(ids), longest, asked, param, limit)
    return replace(prompt, text=text, token_ids=ids, cache_salt=request.cache_salt or "", chunks=chunks)


def _variables(
    exchange: Exchange, template: ChatTemplate, request: ChatRequest | TokenizeRequest, defaults: dict[str, Any] | None
) -> dict[str, Any]:
    """Return further variables of the template. Raises `InvalidParameter` for names that a request cannot set.
    They replace the server's `defaults`. The client gets a warning of those that the template does not read."""
    own = request.chat_template_kwargs or {}
    effort = effort_variables(template, request.reasoning_effort)
    variables = {**(defaults or {}), **effort, **own}
    for name in (*ARGUMENTS, "documents", *SWITCHES):
        if name in variables:
            hint = "send it as a field of the request" if name in SWITCHES else "leave it out"
            raise InvalidParameter(f"chat_template_kwargs may not hold {name}: {hint}.", param="chat_template_kwargs")
    if request.documents is not None:
        variables["documents"] = request.documents
    given = [*own, *(["documents"] if request.documents else [])]
    for name in [name for name in given if name not in template.words] if given else ():
        exchange.warn(f"{ascii(name[:40])} is ignored: the chat template does not read it")
    if request.reasoning_effort is not None and not effort:
        exchange.warn("reasoning_effort is ignored: the chat template does not read it")
    if variables.get("reasoning_effort", "") is None:  # templates take it for an effort, and fail
        del variables["reasoning_effort"]
    return variables


def check_parts(content: str | list[ContentPart] | None, where: str, param: str) -> None:
    """Raise 400 for a content part that is not a text, or has no text."""
    for part in () if isinstance(content, str) else content or ():
        if part.type not in TEXT_PARTS:
            raise not_implemented(f"{where}: {shown(part.type)}", "the model reads text only.", param)
        if getattr(part, field := TEXT_PARTS[part.type]) is None:
            raise InvalidParameter(f"{where}: a part of type {part.type} needs a {field}.", param=param)


def _plain_messages(messages: list[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the messages as dicts for the template. Raises 400 for content that is not text."""
    plain = []
    called: dict[str | None, str] = {}
    for at, message in enumerate(messages):
        if message.role not in template.roles:
            raise InvalidParameter(
                f"messages[{at}].role is {shown(message.role)}, which the chat template does not "
                f"know: send one of {', '.join(sorted(template.roles))}.",
                param="messages",
            )
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
        check_parts(message.content, f"messages[{at}].content", "messages")
        media = (("audio", message.audio), ("images", message.images))  # in an assistant's message only the text counts
        for name in [name for name, given in media if given and message.role != "assistant"]:
            raise not_implemented(f"messages[{at}].{name}", "the model reads text only.", "messages")
        if message.function_call is not None:
            raise InvalidParameter(
                f"messages[{at}].function_call is not read: send tool_calls instead.", param="messages"
            )
        if message.prefix:
            raise InvalidParameter(
                f"messages[{at}].prefix is not read: send continue_final_message instead.", param="messages"
            )
        fields = msgspec.to_builtins(message)
        for name, _ in media:
            fields.pop(name, None)
        if message.role == "tool" and message.name is None and message.tool_call_id in called:
            fields["name"] = called[message.tool_call_id]  # some templates show it
        plain.append(fields)
    return plain

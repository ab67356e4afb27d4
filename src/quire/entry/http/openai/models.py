"""The served model: GET /v1/models and /v1/models/{model}. Its tokenizer, for clients without one: POST /tokenize and
/detokenize, GET /tokenizer_info."""

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.entry.core_request import check_ids
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError
from quire.entry.http.openai import schema
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.prompts import away, conversation_prompt, tokenizer_of
from quire.entry.http.openai.tools import plain_tools
from quire.entry.http.request_response import Exchange
from quire.text.tokenizer import Tokenizer

TOKENIZE = RequestDecoder(  # accepts bodies of chats and completions; their sampling fields do not change the prompt
    schema.TokenizeRequest, unread=frozenset((*schema.SamplingFields.__struct_fields__, "max_completion_tokens"))
)
DETOKENIZE = RequestDecoder(schema.DetokenizeRequest)


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """Answer with the token ids of a text, or of a conversation rendered by the chat template."""
    request = await TOKENIZE.read(context, exchange)
    await context.find(request.model, exchange.scope)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidParameter("the request has both prompt and messages or neither: send one of them.", param="prompt")
    tokenizer, longest = tokenizer_of(context.text(), "prompt"), context.ready().max_model_len
    given: list[int] | None = None
    if request.messages is not None:
        given = (
            await conversation_prompt(
                context, exchange, request, request.messages, None, tools=plain_tools(request.tools or ()) or None
            )
        ).token_ids

    def answer() -> bytes:
        special = request.add_special_tokens is not False
        ids = tokenizer.encode(request.prompt or "", special) if given is None else given
        texts = {token: tokenizer.token_text(token) for token in set(ids)} if request.return_token_strs else {}
        strings = [texts[token] for token in ids] if request.return_token_strs else None
        return msgspec.json.encode(
            schema.TokenizeResponse(count=len(ids), max_model_len=longest, tokens=ids, token_strs=strings)
        )

    await exchange.reply(await away(context, exchange, answer))


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """Answer with the text of token ids."""
    request = await DETOKENIZE.read(context, exchange)
    await context.find(request.model, exchange.scope)
    tokenizer, ids = tokenizer_of(context.text(), "tokens"), request.tokens
    check_ids("tokens", ids, max(tokenizer.vocab_size, context.ready().vocab_size))
    skip = bool(request.skip_special_tokens)
    text = await away(context, exchange, lambda: tokenizer.decode(ids, skip_special_tokens=skip))
    await exchange.reply(msgspec.json.encode(schema.DetokenizeResponse(prompt=text)))


async def tokenizer_info(context: ServerContext, exchange: Exchange) -> None:
    """Answer with the special tokens and the chat template."""
    text = context.text()
    tokenizer = tokenizer_of(text, "tokenizer")
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    answer = schema.TokenizerInfo(
        tokenizer_class=text.tokenizer_class,
        bos_token=_content(tokenizer, bos),
        eos_token=_content(tokenizer, eos),
        pad_token=_content(tokenizer, pad),
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        vocab_size=tokenizer.vocab_size,
        chat_template=None if text.chat_template is None else text.chat_template.source(),
    )
    await exchange.reply(msgspec.json.encode(answer))


async def list_models(context: ServerContext, exchange: Exchange) -> None:
    """Answer GET /v1/models: one entry per name of the served model, and one per adapter."""
    rules, names = caller_of(exchange.scope).rules, (*context.model_names, *context.engine.adapters.names)
    cards = [_card(context, name) for name in names if rules.may_use(name)]
    await exchange.reply(msgspec.json.encode(schema.ModelList(data=cards)))


async def show_model(context: ServerContext, exchange: Exchange) -> None:
    """Answer GET /v1/models/NAME: the entry of this name; 404 if the model is not served under this name."""
    if not (asked := exchange.scope["path_params"]["model"]):
        raise HttpError(404, "the path names no model: see /v1/models.", code="model_not_found", param="model")
    await exchange.reply(msgspec.json.encode(_card(context, await context.find(asked, exchange.scope))))


def _card(context: ServerContext, name: str) -> schema.ModelCard:
    ready, model, adapter = context.engine.ready, context.config.engine.model.model, context.engine.adapters.get(name)
    return schema.ModelCard(
        id=name,
        created=context.created,
        root=model or "quire-tiny" if adapter is None else adapter.folder,
        parent=None if adapter is None else context.model_names[0],
        max_model_len=None if ready is None else ready.max_model_len,
    )


def _content(tokenizer: Tokenizer, token: int | None) -> str | None:
    if token is None:
        return None
    return tokenizer.added_token(token) or tokenizer.token_text(token)

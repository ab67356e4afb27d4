"""POST /tokenize and /detokenize, GET /tokenizer_info: the served tokenizer for clients that have none."""

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.entry.http.context import ServerContext
from quire.entry.http.exchange import Exchange
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.prompts import away, conversation_prompt, encode, tokenizer_of
from quire.entry.http.openai.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from quire.text.protocol import TextTokenizer

TOKENIZE = RequestDecoder(TokenizeRequest)
DETOKENIZE = RequestDecoder(DetokenizeRequest)
CHARACTERS_PER_TOKEN = 4  # about; to see which lists are long


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """The token ids of a text, or of a conversation as the chat template writes it."""
    request, unknown = TOKENIZE.decode(await exchange.body())
    exchange.unknown_fields(unknown)
    context.unknown_fields.log(unknown)
    context.model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidParameter("give either prompt or messages.", param="prompt")
    if request.messages is not None:
        special = bool(request.add_special_tokens)
        prompt = await conversation_prompt(context, exchange, request, request.messages, special)
        ids = prompt.token_ids or []
    else:
        ids = await encode(context, request.prompt or "", request.add_special_tokens is not False)
    tokenizer = tokenizer_of(context.text(), "prompt")
    answer = TokenizeResponse(
        count=len(ids),
        max_model_len=context.ready().max_model_len,
        tokens=ids,
        token_strs=[tokenizer.token_text(i) for i in ids] if request.return_token_strs else None,
    )
    await exchange.reply(msgspec.json.encode(answer))


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """The text of token ids."""
    request, unknown = DETOKENIZE.decode(await exchange.body())
    exchange.unknown_fields(unknown)
    context.unknown_fields.log(unknown)
    context.model(request.model)
    tokenizer, ids = tokenizer_of(context.text(), "tokens"), request.tokens
    size = max(tokenizer.vocab_size, context.ready().vocab_size)
    if ids and max(ids) >= size:
        raise InvalidParameter(
            f"tokens holds {max(ids)}, which is outside the vocabulary of {size} tokens (0 to {size - 1}).",
            param="tokens",
        )
    skip = bool(request.skip_special_tokens)
    text = await away(
        context, CHARACTERS_PER_TOKEN * len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=skip)
    )
    await exchange.reply(msgspec.json.encode(DetokenizeResponse(prompt=text)))


async def tokenizer_info(context: ServerContext, exchange: Exchange) -> None:
    """The special tokens and the chat template."""
    text = context.text()
    tokenizer = tokenizer_of(text, "tokenizer")
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    answer = TokenizerInfo(
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


def _content(tokenizer: TextTokenizer, token: int | None) -> str | None:
    if token is None:
        return None
    return tokenizer.added_token(token) or tokenizer.token_text(token)

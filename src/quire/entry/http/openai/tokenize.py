"""POST /tokenize and /detokenize, GET /tokenizer_info: the served tokenizer for clients that have none."""

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.entry.http.context import ServerContext
from quire.entry.http.exchange import Exchange
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.prompts import away, conversation_prompt, tokenizer_of
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


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """The token ids of a text, or of a conversation as the chat template writes it."""
    request = await TOKENIZE.read(context, exchange)
    context.model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidParameter("give either prompt or messages.", param="prompt")
    tokenizer, longest = tokenizer_of(context.text(), "prompt"), context.ready().max_model_len
    given: list[int] | None = None
    if request.messages is not None:
        given = (await conversation_prompt(context, exchange, request, request.messages, None)).token_ids

    def answer() -> bytes:
        special = request.add_special_tokens is not False
        ids = tokenizer.encode(request.prompt or "", special) if given is None else given
        strings = _strings(tokenizer, ids) if request.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(count=len(ids), max_model_len=longest, tokens=ids, token_strs=strings)
        )

    await exchange.reply(await away(context, exchange.size, answer))


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """The text of token ids."""
    request = await DETOKENIZE.read(context, exchange)
    context.model(request.model)
    tokenizer, ids = tokenizer_of(context.text(), "tokens"), request.tokens
    size = max(tokenizer.vocab_size, context.ready().vocab_size)
    if ids and max(ids) >= size:
        raise InvalidParameter(
            f"tokens holds {max(ids)}, which is outside the vocabulary of {size} tokens (0 to {size - 1}).",
            param="tokens",
        )
    skip = bool(request.skip_special_tokens)
    text = await away(context, exchange.size, lambda: tokenizer.decode(ids, skip_special_tokens=skip))
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


def _strings(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    texts = {token: tokenizer.token_text(token) for token in set(ids)}
    return [texts[token] for token in ids]


def _content(tokenizer: TextTokenizer, token: int | None) -> str | None:
    if token is None:
        return None
    return tokenizer.added_token(token) or tokenizer.token_text(token)

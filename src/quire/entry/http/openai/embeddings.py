"""POST /v1/embeddings: vectors of texts, computed in the same batches as requests that generate."""

import asyncio
import base64
import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.step import F32
from quire.entry.embedding import embed_params, vector_of
from quire.entry.http.access.keyring import client_of
from quire.entry.http.context import ServerContext
from quire.entry.http.observed.request_lines import log_embedding, num_prompt
from quire.entry.http.openai import schema_embeddings as schema
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.prompts import IDS, away, encoded, fitted, longest_prompt, several, tokenizer_of
from quire.entry.http.openai.sampling import request_timeout
from quire.entry.http.request_response import Exchange
from quire.entry.http.request_stream import failure
from quire.entry.prompts import Prompt

DECODER = RequestDecoder(schema.EmbeddingRequest)
ENCODE = msgspec.json.Encoder().encode


async def embed(context: ServerContext, exchange: Exchange) -> None:
    """Answer a request of /v1/embeddings."""
    await answer_vectors(
        context, exchange, await DECODER.read(context, exchange), "embd", _embedding, schema.EmbeddingResponse
    )


def _embedding(index: int, vector: list[float] | str) -> schema.Embedding:
    return schema.Embedding(index=index, embedding=vector)


async def answer_vectors(
    context: ServerContext,
    exchange: Exchange,
    request: schema.EmbeddingRequest,
    prefix: str,
    item: Callable[[int, list[float] | str], msgspec.Struct],
    whole: Callable[..., msgspec.Struct],
) -> None:
    """Answer a request for vectors of texts.

    prefix        beginning of the answer's id
    item, whole   make the answer's part of a vector, and the answer
    """
    exchange.words = ((IDS, "input"),)
    request_id, model = exchange.name(request.request_id), await context.find(request.model, exchange.scope)
    plan, given = context.text().pooling, several(request.input, "input")
    plan.check(request.dimensions)
    if len(given) > schema.MAX_INPUTS:
        raise InvalidParameter(
            f"input holds {len(given)} texts: send at most {schema.MAX_INPUTS} per request.", param="input"
        )
    if not plan.source:
        exchange.warn(f"embeddings are {plan}")
    vectors, usage = await vectors_of(context, exchange, request, given, ["input"], request.dimensions)

    def write() -> bytes:
        # Encoded one by one, since the encoder holds the interpreter's lock during each call.
        data = [
            msgspec.Raw(ENCODE(item(i, _written(vector, request.encoding_format)))) for i, vector in enumerate(vectors)
        ]
        named = f"{prefix}-{request_id}"
        return ENCODE(whole(id=named, created=int(time.time()), model=model, data=data, usage=usage))

    await exchange.reply(await context.text_work.write(client_of(exchange.scope), vectors, write))


async def vectors_of(
    context: ServerContext,
    exchange: Exchange,
    request: schema.EmbeddedFields,
    texts: Sequence[str | list[int]],
    params: Sequence[str],
    dimensions: int | None = None,
) -> tuple[list[F32], schema.PromptUsage]:
    """Compute the embeddings of texts or token ids. Return the vectors and the token counts.
    `params`: names of the request fields of the texts, for errors. The last name stands for all further texts. When the
    engine's queue cannot hold all texts, they are sent in parts. All parts have the same deadline."""
    plan, began = context.text().pooling, time.monotonic()
    prompts = context.adapted(await _prompts(context, exchange, request, texts, params), request.model)
    room = context.config.max_waiting + context.ready().num_slots
    with context.hold(exchange.scope, exchange.request_id) as ticket:
        limits = (request_timeout(exchange.header(b"x-request-timeout")), ticket.deadlines.request_timeout)
        deadline = time.monotonic() + min((limit for limit in limits if limit is not None), default=math.inf)
        async with exchange.watch() as watch:
            await asyncio.sleep(0)  # cancelled here if the client has disconnected
            for at in range(0, len(prompts), room):
                if (left := deadline - time.monotonic()) <= 0:
                    raise failure(exchange.request_id, "deadline")
                stream = ticket.open(
                    context.engine,
                    prompts[at : at + room],
                    embed_params(),
                    request_id=exchange.request_id,
                    priority=request.priority,
                    timeout=left if left < math.inf else None,
                    pool=plan.method,
                )
                try:
                    async for _ in stream:
                        pass
                finally:
                    stream.close()
            watch.stop()
    vectors = [vector_of(generation, plan, dimensions) for generation in ticket.generations]
    count = num_prompt(ticket.streams)
    if context.logs_requests:
        log_embedding(exchange.scope, exchange.request_id, ticket.streams, time.monotonic() - began)
    return vectors, schema.PromptUsage(prompt_tokens=count, total_tokens=count)


async def _prompts(
    context: ServerContext,
    exchange: Exchange,
    request: schema.EmbeddedFields,
    texts: Sequence[str | list[int]],
    params: Sequence[str],
) -> list[Prompt]:
    special = request.add_special_tokens is not False
    longest = longest_prompt(context, request)
    tokenizer = tokenizer_of(context.text(), params[-1]) if any(isinstance(text, str) for text in texts) else None
    named = list(zip(texts, chain(params, repeat(params[-1])), strict=False))

    def prompt(text: str | list[int], param: str) -> Prompt:
        if isinstance(text, list):
            return Prompt(token_ids=text)
        assert tokenizer is not None
        return encoded(tokenizer, [[text]], special, longest, param)

    prompts = await away(context, exchange, lambda: [prompt(*pair) for pair in named])
    return [fitted(context, request, prompt, 0, param) for prompt, (_, param) in zip(prompts, named, strict=True)]


def _written(vector: F32, encoding: str | None) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()

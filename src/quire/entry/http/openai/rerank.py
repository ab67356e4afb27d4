"""POST /v1/rerank and /v1/score: how near texts are, by the cosine between their embeddings."""

import time
from itertools import islice

import msgspec
from msgspec import UNSET

from quire.entry.embedding import likeness, paired
from quire.entry.http.context import ServerContext
from quire.entry.http.exchange import Exchange
from quire.entry.http.openai import schema_embeddings as schema
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.embeddings import vectors_of

RERANK = RequestDecoder(schema.RerankRequest)
SCORE = RequestDecoder(schema.ScoreRequest)


async def rerank(context: ServerContext, exchange: Exchange) -> None:
    """The documents, those nearest to the query first; ties as they came."""
    request = await RERANK.read(context, exchange)
    request_id, model = exchange.name(request.request_id), context.model(request.model)
    context.text().pooling.check_scores()
    texts = [one if isinstance(one, str) else one.text for one in request.documents]
    (query, *others), usage = await vectors_of(context, exchange, request, [request.query, *texts],
                                              ["query", "documents"])
    scores = [likeness(query, other) for other in others]
    shown = request.return_documents is not False
    order = islice(sorted(range(len(texts)), key=lambda i: -scores[i]), request.top_n or None)
    results = [schema.RankedDocument(index=i, relevance_score=scores[i],
                                     document=schema.Document(text=texts[i]) if shown else UNSET) for i in order]
    await exchange.reply(msgspec.json.encode(
        schema.RerankResponse(id=f"rerank-{request_id}", model=model, results=results, usage=usage)))


async def score(context: ServerContext, exchange: Exchange) -> None:
    """The scores of pairs, in the order of `text_2`."""
    request = await SCORE.read(context, exchange)
    request_id, model = exchange.name(request.request_id), context.model(request.model)
    context.text().pooling.check_scores()
    first, second = ([given] if isinstance(given, str) else given for given in (request.text_1, request.text_2))
    pairs = paired(first, second)
    vectors, usage = await vectors_of(context, exchange, request, [*first, *second],
                                       [*["text_1"] * len(first), "text_2"])
    data = [schema.Score(index=i, score=likeness(vectors[one], vectors[len(first) + other]))
            for i, (one, other) in enumerate(pairs)]
    await exchange.reply(msgspec.json.encode(schema.ScoreResponse(
        id=f"score-{request_id}", created=int(time.time()), model=model, data=data, usage=usage)))

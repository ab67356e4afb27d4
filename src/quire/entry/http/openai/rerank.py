"""POST /v1/rerank and /v1/score: similarity of texts, as the cosine between their embeddings."""

import time
from itertools import islice

import msgspec
from msgspec import UNSET

from quire.contracts.errors import InvalidParameter
from quire.entry.embedding import likeness, paired
from quire.entry.http.context import ServerContext
from quire.entry.http.openai import schema_embeddings as schema
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.embeddings import vectors_of
from quire.entry.http.request_response import Exchange

RERANK = RequestDecoder(schema.RerankRequest)
SCORE = RequestDecoder(schema.ScoreRequest)


async def rerank(context: ServerContext, exchange: Exchange) -> None:
    """Answer with the documents, the most similar to the query first. Documents with equal scores keep their order."""
    request = await RERANK.read(context, exchange)
    request_id, model = exchange.name(request.request_id), await context.find(request.model, exchange.scope)
    context.text().pooling.check_scores()
    first, queries = _given(request, "query", "queries")
    second, texts = _given(request, "documents", "items")
    (query, *others), usage = await vectors_of(context, exchange, request, [*queries, *texts], [first, second])
    scores = [likeness(query, other) for other in others]
    shown = request.return_documents is not False
    order = islice(sorted(range(len(texts)), key=lambda i: -scores[i]), request.top_n or None)
    results = [
        schema.RankedDocument(
            index=i, relevance_score=scores[i], document=schema.Document(text=texts[i]) if shown else UNSET
        )
        for i in order
    ]
    await exchange.reply(
        msgspec.json.encode(schema.RerankResponse(id=f"rerank-{request_id}", model=model, results=results, usage=usage))
    )


async def score(context: ServerContext, exchange: Exchange) -> None:
    """Answer with the similarity of each pair of texts, in the order of `text_2`."""
    request = await SCORE.read(context, exchange)
    request_id, model = exchange.name(request.request_id), await context.find(request.model, exchange.scope)
    context.text().pooling.check_scores()
    name, first = _given(request, "text_1", "queries", "data_1")
    other_name, second = _given(request, "text_2", "documents", "items", "data_2")
    exchange.words = (("^text_2$", other_name),)
    pairs = paired(first, second)
    vectors, usage = await vectors_of(context, exchange, request, [*first, *second], [*[name] * len(first), other_name])
    data = [
        schema.Score(index=i, score=likeness(vectors[one], vectors[len(first) + other]))
        for i, (one, other) in enumerate(pairs)
    ]
    await exchange.reply(
        msgspec.json.encode(
            schema.ScoreResponse(
                id=f"score-{request_id}", created=int(time.time()), model=model, data=data, usage=usage
            )
        )
    )


def _given(request: schema.RerankRequest | schema.ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """Return the name under which a request has a field, and its texts. Raises 400 for no name, or for several."""
    found = [name for name in names if getattr(request, name) is not None]
    if not found:
        raise InvalidParameter(
            f"{names[0]} is missing: it must be a text or a list of texts. Its other names are {', '.join(names[1:])}.",
            param=names[0],
        )
    if len(found) > 1:
        raise InvalidParameter(f"{' and '.join(found)} are names of the same field: send one of them.", param=found[1])
    value = getattr(request, found[0])
    texts = [value] if isinstance(value, str) else value
    return found[0], [one if isinstance(one, str) else one.text for one in texts]

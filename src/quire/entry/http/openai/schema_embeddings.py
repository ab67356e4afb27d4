"""Types of embeddings, reranking and scores, like `schema`. Answers of reranking follow Cohere and Jina, those of
scores follow vLLM."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.entry.http.openai.schema import PromptFields

MAX_INPUTS = 2_048  # texts of one request

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class EmbeddedFields(PromptFields, kw_only=True):
    """Fields that requests for embeddings, reranking and scores share."""

    user: str | None = None


class EmbeddingRequest(EmbeddedFields, kw_only=True):
    """POST /v1/embeddings. `input`: a text, several texts, token ids, or several lists of token ids.

    encoding_format   "base64": little-endian float32
    dimensions        keep this many numbers of each vector, the first ones, and normalize the vector to length 1
    """

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class Document(msgspec.Struct, kw_only=True):
    """A text to rank."""

    text: str


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankRequest(EmbeddedFields, kw_only=True):
    """POST /v1/rerank.

    queries, items     other names of `query` and `documents`
    top_n              number of results; 0 = all
    return_documents   return the text of each document (default: true)
    """

    query: str | None = None
    queries: str | Annotated[list[str], Meta(min_length=1, max_length=1)] | None = None
    documents: str | Documents | None = None
    items: str | Documents | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


class ScoreRequest(EmbeddedFields, kw_only=True):
    """POST /v1/score: `text_1` with each of `text_2`, or two lists of the same length, pair by pair.

    queries, data_1            other names of `text_1`
    documents, items, data_2   other names of `text_2`
    """

    text_1: str | Texts | None = None
    queries: str | Texts | None = None
    data_1: str | Texts | None = None
    text_2: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_2: str | Texts | None = None


class PromptUsage(msgspec.Struct, kw_only=True):
    """Token counts of all texts of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of an input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document, by its index in the request, and its similarity to the query, in [-1, 1]."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/rerank, the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class Score(msgspec.Struct, kw_only=True):
    """Similarity of the texts of a pair, in [-1, 1]."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage

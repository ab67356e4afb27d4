"""POST /pooling, as vLLM has it: the pooled output of the model for texts. The only task is "embed"."""

from typing import Literal

import msgspec

from quire.contracts.errors import shown
from quire.entry.embedding import TASK, TASKS
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import not_implemented
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.openai.embeddings import answer_vectors
from quire.entry.http.openai.schema_embeddings import EmbeddingRequest, PromptUsage
from quire.entry.http.request_response import Exchange


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling. `task`: "embed"; vLLM's other tasks are refused by name."""

    task: str | None = None


class Pooled(msgspec.Struct, kw_only=True):
    """The output of an input."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingResponse(msgspec.Struct, kw_only=True):
    """Answer of /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage


DECODER = RequestDecoder(PoolingRequest)


async def pool(context: ServerContext, exchange: Exchange) -> None:
    """Answer a request of /pooling."""
    request = await DECODER.read(context, exchange)
    if request.task != TASK:
        raise not_implemented(f"task={shown(request.task)}", TASKS, "task")
    await answer_vectors(context, exchange, request, "pool", _pooled, PoolingResponse)


def _pooled(index: int, vector: list[float] | str) -> Pooled:
    return Pooled(index=index, data=vector)

"""The routes of the OpenAI and Anthropic APIs. Every route turns its errors into answers."""

from collections.abc import Awaitable, Callable

from starlette.routing import Route

from quire.entry.http.anthropic.messages import count_tokens, messages
from quire.entry.http.anthropic.schema import CountAnswer, MessageAnswer, MessagesRequest
from quire.entry.http.context import ServerContext
from quire.entry.http.kept.routes import cancel, retrieve
from quire.entry.http.lora.routes import ROUTES as ADAPTERS
from quire.entry.http.observed.request_metrics import count_failure
from quire.entry.http.openai import schema, schema_embeddings
from quire.entry.http.openai.chat import chat
from quire.entry.http.openai.completions import complete
from quire.entry.http.openai.embeddings import embed
from quire.entry.http.openai.models import detokenize, list_models, show_model, tokenize, tokenizer_info
from quire.entry.http.openai.rerank import rerank, score
from quire.entry.http.openai.responses import respond
from quire.entry.http.openai.responses_schema import ResponseAnswer, ResponseRequest
from quire.entry.http.request_response import ClientGone, Exchange, Receive, Scope
from quire.entry.http.sse import Send
from quire.entry.http.text_work import LONG
from quire.entry.http.vectors.pooling import PoolingRequest, PoolingResponse, pool

Handler = Callable[[ServerContext, Exchange], Awaitable[None]]

# Methods, paths, handler, and the types of request body and answer for the OpenAPI document.
HANDLERS: tuple[tuple[str, str, Handler, type | None, type], ...] = (
    ("POST", "/v1/completions", complete, schema.CompletionRequest, schema.CompletionResponse),
    ("POST", "/v1/chat/completions", chat, schema.ChatRequest, schema.ChatResponse),
    ("POST", "/v1/responses", respond, ResponseRequest, ResponseAnswer),
    ("GET DELETE", "/v1/responses/{response_id}", retrieve, None, ResponseAnswer),
    ("POST", "/v1/responses/{response_id}/cancel", cancel, None, ResponseAnswer),
    ("POST", "/v1/messages", messages, MessagesRequest, MessageAnswer),
    ("POST", "/v1/messages/count_tokens", count_tokens, MessagesRequest, CountAnswer),
    ("POST", "/v1/embeddings", embed, schema_embeddings.EmbeddingRequest, schema_embeddings.EmbeddingResponse),
    ("POST", "/pooling", pool, PoolingRequest, PoolingResponse),
    (
        "POST",
        "/v1/rerank /rerank /v2/rerank",
        rerank,
        schema_embeddings.RerankRequest,
        schema_embeddings.RerankResponse,
    ),
    ("POST", "/v1/score /score", score, schema_embeddings.ScoreRequest, schema_embeddings.ScoreResponse),
    ("GET", "/v1/models", list_models, None, schema.ModelList),
    ("GET", "/v1/models/{model:path}", show_model, None, schema.ModelCard),
    ("POST", "/tokenize", tokenize, schema.TokenizeRequest, schema.TokenizeResponse),
    ("POST", "/detokenize", detokenize, schema.DetokenizeRequest, schema.DetokenizeResponse),
    ("GET", "/tokenizer_info", tokenizer_info, None, schema.TokenizerInfo),
    *ADAPTERS,
)


class Endpoint:
    """A route as an ASGI application. A client that has disconnected gets no answer."""

    def __init__(self, context: ServerContext, handler: Handler) -> None:
        self._context, self._handler = context, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._handler(self._context, exchange)
        except ClientGone:
            return
        except Exception as error:  # the client always gets an answer, and other requests go on
            count_failure(self._context.metrics, error, scope)
            await exchange.fail(error)
        finally:
            if exchange.size >= LONG:
                self._context.memory.count(exchange.size)


def routes(context: ServerContext) -> list[Route]:
    """Return the routes of the OpenAI, Anthropic and rerank APIs, and vLLM's tokenizer routes."""
    return [
        Route(path, Endpoint(context, handler), methods=methods.split(), name=handler.__name__)
        for methods, paths, handler, *_ in HANDLERS
        for path in paths.split()
    ]

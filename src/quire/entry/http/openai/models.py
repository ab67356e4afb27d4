"""GET /v1/models and /v1/models/{model}: what is served, under which names."""

import msgspec

from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError
from quire.entry.http.exchange import Exchange
from quire.entry.http.openai.schema import ModelCard, ModelList


async def list_models(context: ServerContext, exchange: Exchange) -> None:
    """Every name of the served model."""
    await exchange.reply(msgspec.json.encode(ModelList(data=[_card(context, name) for name in context.model_names])))


async def show_model(context: ServerContext, exchange: Exchange) -> None:
    """One name; 404 when it is not served."""
    asked = exchange.scope["path_params"]["model"]
    if not asked:
        raise HttpError(404, "no model is named: /v1/models lists them.", code="model_not_found", param="model")
    name = context.model(asked)
    await exchange.reply(msgspec.json.encode(_card(context, name)))


def _card(context: ServerContext, name: str) -> ModelCard:
    ready, model = context.engine.ready, context.config.engine.model.model
    return ModelCard(
        id=name,
        created=context.created,
        root=model or "quire-tiny",
        max_model_len=None if ready is None else ready.max_model_len,
    )

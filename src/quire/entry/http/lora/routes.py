"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: they change the names of adapters."""

import msgspec

from quire.contracts.errors import UserError
from quire.entry.http.context import ServerContext
from quire.entry.http.errors import HttpError
from quire.entry.http.openai.decode import RequestDecoder
from quire.entry.http.request_response import Exchange

OFF = "--allow-runtime-lora-updating"


class LoadRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/load_lora_adapter. load_inplace: replace an adapter of the same name for later requests"""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter. lora_int_id: vLLM's number, which is not read"""

    lora_name: str
    lora_int_id: int | None = None


class AdapterChanged(msgspec.Struct, kw_only=True):
    """Answer of both routes."""

    message: str


LOAD, UNLOAD = RequestDecoder(LoadRequest), RequestDecoder(UnloadRequest)


async def load_lora_adapter(context: ServerContext, exchange: Exchange) -> None:
    """Read an adapter and give it a name."""
    request = await LOAD.read(context, exchange)
    _check_allowed(context)
    try:
        await context.engine.adapters.load(request.lora_name, request.lora_path, anew=request.load_inplace)
    except UserError as error:
        raise HttpError(400, str(error), param="lora_path", code="invalid_adapter") from None
    await _done(exchange, f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_lora_adapter(context: ServerContext, exchange: Exchange) -> None:
    """Forget the name of an adapter."""
    request = await UNLOAD.read(context, exchange)
    _check_allowed(context)
    try:
        context.engine.adapters.unload(request.lora_name)
    except UserError as error:
        raise HttpError(404, str(error), param="lora_name", code="adapter_not_found") from None
    await _done(exchange, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


async def _done(exchange: Exchange, words: str) -> None:
    await exchange.reply(msgspec.json.encode(AdapterChanged(message=words)))


def _check_allowed(context: ServerContext) -> None:
    if not context.config.lora.allow_runtime_lora_updating:
        raise HttpError(
            404, f"this server's adapters cannot be changed while it runs: start it with {OFF}.", code="not_allowed"
        )


# Methods, paths, handler, and the types of body and answer.
ROUTES = (
    ("POST", "/v1/load_lora_adapter", load_lora_adapter, LoadRequest, AdapterChanged),
    ("POST", "/v1/unload_lora_adapter", unload_lora_adapter, UnloadRequest, AdapterChanged),
)

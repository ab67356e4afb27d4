"""vLLM's routes about the life of an engine. They exist only with the options that allow them; see `OFF`.

--enable-sleep-mode         POST /sleep?level=1|2&mode=, POST /wake_up?tags=, GET /is_sleeping
--weight-transfer-config    POST /pause?mode=, POST /resume, GET /is_paused, GET /get_world_size, and POST
                            /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update

Whoever may call them can stop the server or change what its model says: every API key may.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config.serve import ServerConfig
from quire.contracts.errors import EngineError
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import HttpError
from quire.entry.http.life.asleep import asleep, note, revive
from quire.entry.http.life.state import EngineState

POLL_SECONDS = 0.02  # between two looks at whether the running requests have ended
SLEEP, WEIGHTS = "--enable-sleep-mode", "--weight-transfer-config"
OFF: Mapping[str, str] = {
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), f"start the server with {SLEEP}"),
    **dict.fromkeys(
        (
            "/pause",
            "/resume",
            "/is_paused",
            "/get_world_size",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        ),
        f'start the server with {WEIGHTS} \'{{"backend": "files"}}\'',
    ),
    "/collective_rpc": "it runs any function of a worker by name: use /start_weight_update, /update_weights and "
    "/finish_weight_update for weights, and /sleep and /wake_up for memory",
}  # path that a server may lack -> the way to have it
Parameters = Mapping[str, str]
Do = Callable[["Operations", Parameters, dict[str, Any]], Awaitable[dict[str, object]]]


class Operations:
    """The operations of `procs.life`, as the routes need them."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine

    async def run(self, name: str, **args: Any) -> Any:
        """Run an operation in the core. An error is answered 400: the engine goes on as it was, or says why not."""
        try:
            return await self.engine.control(name, **args)
        except EngineError as error:
            if type(error) is not EngineError:
                raise
            raise HttpError(400, str(error), code="not_done") from None

    async def quiet(self, name: str, mode: str) -> None:
        """Stop requests in a way (`Life.pause`), and wait until none runs."""
        settled = await self.run(name, mode=mode)
        while not settled:
            await asyncio.sleep(POLL_SECONDS)
            settled = await self.run("settled")


async def _pause(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    wait = given.get("wait_for_inflight_requests", "").lower() in ("true", "1")  # vLLM's older spelling
    await life.quiet("pause", given.get("mode", "wait" if wait else "abort"))
    return {"status": "paused"}


async def _resume(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    await life.run("resume")
    return {"status": "resumed"}


async def _is_paused(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    return {"is_paused": await life.run("is_paused")}


async def _sleep(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    level = given.get("level", "1")
    if level not in ("1", "2"):
        raise HttpError(400, f"level={level[:20]!r}: must be 1 or 2; /pause stops requests alone.", param="level")
    if not await life.run("is_sleeping"):
        await life.quiet("quiet", given.get("mode", "abort"))
    await life.run("sleep", level=int(level))
    note(life.engine, sleeping=True)
    return {"status": "asleep", "level": int(level)}


async def _wake_up(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    if life.engine.state is EngineState.RESTARTING:  # the core died asleep
        await revive(life.engine)
        return {"status": "awake"}
    tags = [one for part in given.get("tags", "").split(",") if (one := part.strip())]
    await life.run("wake_up", tags=tags or None)
    sleeping = bool(await life.run("is_sleeping"))
    note(life.engine, sleeping=sleeping)
    return {"status": "asleep" if sleeping else "awake"}


async def _is_sleeping(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    if life.engine.state is EngineState.RESTARTING:
        return {"is_sleeping": asleep(life.engine)}
    return {"is_sleeping": await life.run("is_sleeping")}


async def _world_size(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    return {"world_size": 1}  # an engine takes one place of a transfer group, whatever its number of ranks


async def _init(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    await life.run("init_weights", init_info=_inside(body, "init_info"))
    return {"message": "Weight transfer initialized"}


async def _start(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    if body.get("is_checkpoint_format", True) is not True:
        raise HttpError(
            400,
            "is_checkpoint_format must be true: each engine packs weights for its own kernels, so send tensors as a "
            "checkpoint has them.",
            param="is_checkpoint_format",
        )
    await life.run("start_weights")
    return {"message": "Weight update started"}


async def _update(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    await life.run("update_weights", update_info=_inside(body, "update_info"))
    return {"message": "Weights updated"}


async def _finish(life: Operations, given: Parameters, body: dict[str, Any]) -> dict[str, object]:
    await life.run("finish_weights")
    return {"message": "Weight update finished"}


def _inside(body: dict[str, Any], name: str) -> dict[str, Any]:
    found = body.get(name)
    if not isinstance(found, dict):
        raise HttpError(400, f"the body must have {name}, an object.", param=name)
    return found


SLEEP_ROUTES: tuple[tuple[str, str, Do], ...] = (
    ("POST", "/sleep", _sleep),
    ("POST", "/wake_up", _wake_up),
    ("GET", "/is_sleeping", _is_sleeping),
)
WEIGHT_ROUTES: tuple[tuple[str, str, Do], ...] = (
    ("POST", "/pause", _pause),
    ("POST", "/resume", _resume),
    ("GET", "/is_paused", _is_paused),
    ("GET", "/get_world_size", _world_size),
    ("POST", "/init_weight_transfer_engine", _init),
    ("POST", "/start_weight_update", _start),
    ("POST", "/update_weights", _update),
    ("POST", "/finish_weight_update", _finish),
)


def life_routes(engine: ServedEngine, config: ServerConfig) -> list[Route]:
    """Return the routes that the options allow."""
    life = config.engine.life
    allowed = SLEEP_ROUTES * life.enable_sleep_mode + WEIGHT_ROUTES * bool(life.backend)
    return [Route(path, _answer(Operations(engine), do), methods=[method]) for method, path, do in allowed]


def _answer(life: Operations, do: Do) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body: dict[str, Any] = {}
        if text := await request.body():
            try:
                body = msgspec.json.decode(text, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise HttpError(400, f"the body is no JSON object: {error}.") from None
        told = await do(life, dict(request.query_params), body)
        return Response(msgspec.json.encode(told), media_type="application/json")

    return answer

"""Readiness of the server as a value. `/health`, `/ready` and the gate before the API use it."""

from collections.abc import Collection
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Scope

from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import error_answer
from quire.entry.http.life.asleep import WAKING, asleep
from quire.entry.http.life.state import EngineState
from quire.observe.metrics import Metrics

KEPT = ("/v1/responses/", "/debug/live", "/debug/blocks", "/debug/requests/")  # paths, and paths below those with a /
REASONS = {"starting": "starting", "restarting": "starting", "draining": "closed"}  # status -> reason of a refusal
RETRY_AFTER = 5  # least seconds in the Retry-After header while the server starts, drains or is dead
MOST_RETRY_AFTER = 120


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Readiness of the server. `reason`: a sentence for people; "" when ready.

    status   ready, starting, restarting, draining, dead or hung
    retry_after   seconds after which clients may try again
    """

    status: str
    reason: str
    retry_after: int = RETRY_AFTER

    @property
    def ready(self) -> bool:
        """True when a load balancer should send requests here."""
        return self.status == "ready"

    @property
    def alive(self) -> bool:
        """True while the engine runs; it may be hung or draining."""
        return self.status not in ("starting", "restarting", "dead")


def readiness(engine: ServedEngine, hang_timeout: float) -> Readiness:
    """Return the readiness of `engine`. It counts as hung after `hang_timeout` seconds without a finished step."""
    last = engine.loading
    share = f", {100 * last.done // last.total} %" if last.total else ""
    if engine.state is EngineState.RESTARTING:
        how = "POST /wake_up starts it again." if asleep(engine) else f"It is started again ({last.phase}{share})."
        took = sum(engine.ready.phases.values()) if engine.ready is not None else 0.0  # the last start
        retry_after = round(min(max(took, RETRY_AFTER), MOST_RETRY_AFTER))
        return Readiness(status="restarting", reason=f"{engine.loss} {how}", retry_after=retry_after)
    if engine.state is EngineState.STARTING:
        return Readiness(status="starting", reason=f"the engine is being loaded ({last.phase}{share}).")
    if engine.state is EngineState.DEAD:
        return Readiness(status="dead", reason=f"the engine stopped: {engine.failure}")
    if engine.state is EngineState.DRAINING:
        return Readiness(status="draining", reason="the server is shutting down.")
    age = engine.last_step_age
    if age is not None and age > hang_timeout:
        return Readiness(status="hung", reason=f"the engine has not finished a step for {age:.0f} s.")
    return Readiness(status="ready", reason="")


class Gate:
    """Function for `auth.Guard`: refuses paths not in `always` with 503 while the engine starts, drains or is dead.
    While the server drains, background responses (/v1/responses/ID) can still be fetched and cancelled, and the live
    view shows the requests that are left."""

    def __init__(self, engine: ServedEngine, always: Collection[str], metrics: Metrics) -> None:
        self._engine, self._always, self._metrics = engine, always, metrics

    def __call__(self, scope: Scope) -> Response | None:
        draining = self._engine.state is EngineState.DRAINING
        if (
            self._engine.state is EngineState.READY
            or scope["path"] in self._always
            or (draining and scope["path"].startswith(KEPT))
            or (scope["path"] in WAKING and asleep(self._engine))
        ):
            return None
        now = readiness(self._engine, float("inf"))
        if scope["method"] == "POST":  # a request for an answer
            self._metrics.rejected(REASONS.get(now.status, "dead"))
        headers = {"retry-after": str(now.retry_after), "connection": "close"}
        return error_answer(503, now.reason, f"engine_{now.status}", headers=headers)

"""The sleep of an engine as all HTTP processes of a server know it, also when the core has died asleep."""

import asyncio

from quire.entry.http.engine import ServedEngine
from quire.entry.http.life.state import EngineState
from quire.procs.core_restarts import note_sleep, sleeps

POLL_SECONDS = 0.02  # between two looks at a core that is started again
WAKING = ("/wake_up", "/is_sleeping")  # paths of an engine that has died asleep


def asleep(engine: ServedEngine) -> bool:
    """Return True while the engine sleeps. A core that dies asleep is started again when it is woken."""
    return engine.config.life.enable_sleep_mode and sleeps(engine.place.folder)


def note(engine: ServedEngine, *, sleeping: bool) -> None:
    """Tell all HTTP processes that the engine sleeps, or is awake."""
    if engine.config.life.restart:
        note_sleep(engine.place.folder, asleep=sleeping)


async def revive(engine: ServedEngine) -> None:
    """Start the core that has died asleep, and wait until it serves. Raises the reason if it never does."""
    note(engine, sleeping=False)
    while engine.state is EngineState.RESTARTING:
        await asyncio.sleep(POLL_SECONDS)
    if engine.failure is not None:
        raise engine.failure

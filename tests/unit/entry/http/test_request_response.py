"""The watch over a client that may leave."""

import asyncio
import gc
import weakref

from quire.entry.http.request_response import Watch


def test_a_watch_is_freed_at_its_end() -> None:
    """It does not wait for a garbage collection, with the request that it was for."""

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        async with (watch := Watch(receive)):
            await asyncio.sleep(0)
        left = weakref.ref(watch)
        del watch
        await asyncio.sleep(0)  # the listener ends
        await asyncio.sleep(0)
        assert left() is None

    gc.disable()
    try:
        asyncio.run(work())
    finally:
        gc.enable()

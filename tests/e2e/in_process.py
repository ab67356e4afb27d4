"""A server in threads of this process, on a real port: for tests that look inside or make something in it fail."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.config.serve import ServerConfig
from quire.engine.core import EngineCore
from quire.entry.core_process import build
from quire.entry.http.app import build_app
from quire.entry.http.engine import ServedEngine
from quire.entry.http.listener import HttpListener
from quire.entry.http.server import BEFORE_ROUTES
from quire.observe.metrics import Metrics
from quire.observe.tracing import open_tracer
from quire.procs.messages import CoreStart

from ..support.core_thread import CoreThread
from .serving import PATIENCE, Server


@dataclass
class Inside:
    """The parts of the server. `server` has no process; the engine belongs to the loop's thread."""

    server: Server
    engine: ServedEngine
    core: EngineCore
    loop: asyncio.AbstractEventLoop

    def check(self) -> None:
        """Fails when an idle core or front end holds anything."""
        checked = asyncio.run_coroutine_threadsafe(self.engine.control("check"), self.loop)
        assert checked.result(PATIENCE) is True
        assert self.engine.front is not None and len(self.engine.front) == 0 and self.engine.num_live == 0


@contextlib.contextmanager
def running_inside(**options: Any) -> Iterator[Inside]:
    """A server with these options, ready; without a model unless told otherwise."""
    config = ServerConfig.from_flat(**({"device": "mock"} | options))
    found: list[Inside] = []
    failures: list[BaseException] = []
    ready, stop = threading.Event(), threading.Event()

    async def main(listener: socket.socket) -> None:
        made: list[CoreThread] = []

        def launch(start: CoreStart) -> CoreThread:
            made.append(CoreThread(start, build))
            return made[-1]

        metrics = Metrics("quire", "mock")
        tracer = open_tracer(config.tracing, metrics.trace_spans)
        engine = ServedEngine(config, metrics=metrics, launch=launch)
        http = HttpListener(
            build_app(engine, config, metrics, tracer=tracer),
            config.http,
            listener,
            partial(metrics.http, BEFORE_ROUTES, method="any"),
        )
        http.start()
        try:
            await engine.start(lambda loading: None)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = Server(None, Path(), url)  # type: ignore[arg-type]
            assert made[0].core is not None
            found.append(Inside(server, engine, made[0].core, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(stop.wait)
        finally:
            await engine.close()
            await http.stop(1.0)
            if tracer is not None:
                tracer.close()

    def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            try:
                asyncio.run(main(listener))
            except BaseException as error:
                failures.append(error)
            finally:
                ready.set()

    thread = threading.Thread(target=run, name="quire-http", daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE) and not failures, failures
        yield found[0]
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert not failures, failures

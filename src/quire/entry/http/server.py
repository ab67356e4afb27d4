"""The life of a server: listen, load, serve, drain, end.

    listen      the port answers at once: /health reports the progress of loading, the API answers 503
    load        the core process is started; a failure ends the server with its message and an exit code
    serve       until a signal, or until the engine dies
    drain       SIGTERM or Ctrl-C: no new requests, running ones get `shutdown_timeout` to finish; a second signal
                ends at once
    death       streams end with an error; the API answers 503 for `DEATH_GRACE`, then exit code 1

Knows processes and time, nothing of requests. Exit codes: `entry/exit_codes.py`.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from quire.config.flags import error_text
from quire.config.serve import ServerConfig
from quire.contracts.errors import QuireError
from quire.entry.exit_codes import DONE, FAILED, exit_code
from quire.entry.http.app import build_app, make_context
from quire.entry.http.console import Console
from quire.entry.http.context import ServerContext
from quire.entry.http.engine import ServedEngine
from quire.entry.http.life.warm_up import WarmUp
from quire.entry.http.listener import HttpListener
from quire.entry.http.observed.reloads import counted
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.sockets import listen, release, url_of
from quire.entry.signals import OperatorSignals, StopRequests
from quire.entry.terminal_messages import wrapped
from quire.observe.log_lines import JSON, notice, set_up_logging
from quire.observe.log_writer import drain_log
from quire.observe.metrics import Metrics
from quire.observe.process import collect_garbage, keep_little_memory, watch_event_loop
from quire.observe.shared import SharedMetrics
from quire.observe.tracing import open_tracer
from quire.procs.front_ends import FrontPlace, start_front

LOG = logging.getLogger("quire")
DEATH_GRACE = 3.0  # seconds for which a server with a dead engine answers 503
FLUSH_GRACE = 1.0  # seconds for aborted streams to send their error
BEFORE_ROUTES = "refused"  # metrics label of responses that the protocol sent before any route
FRONT_MODULE = "quire.entry.http.life.further_process"  # of each HTTP process but the first
STATS_INTERVAL = 10.0  # seconds
THREAD_GRACE = 0.5  # seconds for threads to end by themselves
# The default of 700 new objects means a collection every few streamed events; this took 4 to 6 % off their CPU time
# (64 streams, 100 events/s each, `--device mock`).
GC_THRESHOLDS = (50_000, 50, 100)


def run(config: ServerConfig, console: Console) -> int:
    """Listen, serve until the end, and return the exit code. An error is printed to stderr.
    If a thread hangs in a call that cannot be interrupted (a download), this closes everything and ends the process
    itself, so that Ctrl-C does not wait for the thread."""
    set_up_logging(config.log.log_format, "http")
    LOG.setLevel(config.log.level)
    try:
        listener = listen(config.http)
        try:
            code = run_loop(serve(config, listener, console, FrontPlace(count=config.serve.api_server_count)))
        finally:
            release(listener, config.http)
    except QuireError as error:
        console.close()
        line = notice(error_text(error), "error", config.log.log_format)
        print(line if config.log.log_format == JSON else wrapped(line), file=sys.stderr)
        code = exit_code(error)
    if _threads_left():
        console.close()
        sys.stdout.flush()
        drain_log()
        os._exit(code)
    return code


async def serve(config: ServerConfig, listener: socket.socket, console: Console, place: FrontPlace) -> int:
    """Serve on a listening socket until the end. Return the exit code. Raises the `QuireError` of a failed start.
    `place`: of this HTTP process among several; only the first one listens before the model is loaded."""
    shared = {"number": place.number, "count": place.count, "again": place.again}
    metrics = SharedMetrics(config.serve.metrics_prefix, config.model_names[0], **shared)
    tracer = open_tracer(config.tracing, metrics.trace_spans)
    starter = partial(start_front, FRONT_MODULE, config, listener.fileno())
    engine = ServedEngine(config, metrics=metrics, place=place, more=starter)
    context = make_context(engine, config, metrics)
    if config.http.warmup_requests is not None:
        engine.warm_up = WarmUp(context, console.note).run
    http = HttpListener(
        build_app(engine, config, metrics, context, tracer),
        config.http,
        listener,
        partial(metrics.http, BEFORE_ROUTES, method="any"),
        shared=place.count > 1,
        log=AccessLog(config.log),
    )
    metrics.certificate_end = lambda: http.certificate_end
    reload = {"keys": context.keyring.reload} if config.access.api_key_file is not None else {}
    reload |= {"certificate": http.reload_certificate} if config.http.ssl_certfile is not None else {}
    operator = OperatorSignals(
        [*counted(reload, metrics.reloads)], engine.signal_others, console.note, config.log.level
    )
    with operator, StopRequests(further=place.number > 0) as stop:
        if place.number == 0:
            http.start()
            console.note(f"Listening on {url_of(listener, config.http)} (answers 503 until the model is loaded)")
        try:
            return await _Life(engine, http, config, console, stop).run(metrics, context)
        finally:
            await engine.close()
            await http.stop(FLUSH_GRACE)
            if tracer is not None:
                tracer.close()


class _Life:
    """The life of a server from loading to the end."""

    def __init__(
        self, engine: ServedEngine, http: HttpListener, config: ServerConfig, console: Console, stop: StopRequests
    ) -> None:
        self._engine, self._http, self._config, self._console = engine, http, config, console
        self._stop = stop

    async def run(self, metrics: SharedMetrics, context: ServerContext) -> int:
        """Load the model, serve until the end, and drain. Return the exit code. Raises the error of a failed start."""
        first = asyncio.create_task(self._stop.first.wait())
        starting = asyncio.create_task(self._engine.start(self._console.loading))
        await first_of(starting, first, self._http.serving)
        if not starting.done():
            starting.cancel()
            return self._stop.code if first.done() else self._listener_failed()
        ready = starting.result()
        settle_memory()
        context.limits.table.clear()
        self._http.start()
        self._console.banner(ready, self._config, url_of(self._http.socket, self._config.http))
        ticking = asyncio.create_task(self._tick(metrics))
        watching = asyncio.create_task(watch_event_loop(metrics.loop_lag))
        collecting = asyncio.create_task(collect_garbage())
        sharing = asyncio.create_task(metrics.share(Path(self._engine.place.folder)))
        dead = asyncio.create_task(self._engine.closed())
        try:
            await first_of(dead, first, self._http.serving)
            if first.done() and not dead.done():
                return await self._drain(dead)
            if dead.done():
                return await self._die(dead.result())
            return self._listener_failed()
        finally:
            for task in (ticking, watching, collecting, dead, first, sharing):
                task.cancel()

    async def _drain(self, dead: "asyncio.Task[QuireError]") -> int:
        timeout, began = self._config.serve.shutdown_timeout, time.monotonic()
        self._engine.drain()
        count = self._engine.place.count
        where = f" in the first of {count} processes" if count > 1 else ""  # each knows its own requests
        if (running := self._engine.num_live) or where:
            have = (
                f"running{where}, and those of the others, have"
                if where
                else f"running {'has' if running == 1 else 'have'}"
            )
            self._console.note(
                f"{self._stop.name}: no new requests; {running} {have} {timeout:g} s to finish. "
                "A second signal ends at once."
            )
        second = asyncio.create_task(self._stop.second.wait())
        finishing = asyncio.create_task(self._finish(timeout))
        await first_of(finishing, second, dead)
        for task in (finishing, second):
            task.cancel()
        if dead.done():
            return await self._die(dead.result())
        if left := self._engine.num_live:
            what = "1 request" if left == 1 else f"{left} requests"
            what += f" did not finish{where}; {'it ends' if left == 1 else 'they end'}"
            self._console.note(f"{what} with an error.")
        self._console.note(f"Stopped, {time.monotonic() - began:.1f} s after {self._stop.name}.")
        return self._stop.code if self._stop.second.is_set() else DONE

    async def _finish(self, timeout: float) -> None:
        """Wait until every request is finished and sent, or until the timeout."""
        began = time.monotonic()
        try:
            await asyncio.wait_for(self._engine.wait_idle(), timeout)
        except TimeoutError:
            return
        await self._http.stop(max(FLUSH_GRACE, timeout - (time.monotonic() - began)))

    async def _die(self, cause: QuireError) -> int:
        self._console.fault(f"The engine died: {cause} Ending in {DEATH_GRACE:g} s with exit code {FAILED}.")
        second = asyncio.create_task(self._stop.second.wait())
        await asyncio.wait({second}, timeout=DEATH_GRACE)
        second.cancel()
        return FAILED

    def _listener_failed(self) -> int:
        error = self._http.serving.exception() if not self._http.serving.cancelled() else None
        self._console.fault(f"The HTTP server failed: {error or 'no reason given'}")
        return FAILED

    async def _tick(self, metrics: Metrics) -> None:
        while not self._config.log.disable_log_stats:
            await asyncio.sleep(STATS_INTERVAL)
            self._console.stats(metrics.snapshot())


def settle_memory() -> None:
    """Tune memory after loading: garbage collection runs less often, and skips the objects that exist now.
    They live as long as the process. A full collection over a tokenizer's vocabulary would stop every stream for tens
    of milliseconds. From now on the C library returns freed memory to the system early."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    keep_little_memory()


async def first_of(*tasks: "asyncio.Future[Any]") -> None:
    """Wait until any of the tasks is done."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine as `asyncio.run` does, but do not wait for threads at the end."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _threads_left() -> bool:
    """Return True when a non-daemon thread still runs after `THREAD_GRACE`: the interpreter would wait for it."""
    deadline = time.monotonic() + THREAD_GRACE
    waited_for = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in waited_for:
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in waited_for)

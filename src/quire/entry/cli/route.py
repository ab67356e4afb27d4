"""`quire route`: one HTTP address in front of several servers. Puts a router behind the HTTP listener of `quire serve`.

Never imports torch.
"""

import argparse
import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from quire.config import flags
from quire.config.env import refuse_empty, variable
from quire.config.serve import AccessConfig, HttpConfig, LogConfig, ServerConfig, TracingConfig
from quire.entry.cli.serve import CHECK
from quire.entry.exit_codes import DONE, FAILED
from quire.entry.keyboard_interrupt import raise_on_interrupt
from quire.observe.log_lines import NoticeFormatter, lost_lines, set_up_logging
from quire.observe.log_writer import log_written_apart
from quire.router.settings import RouterConfig, router_config

LOG = logging.getLogger("quire")
SUMMARY = "pass requests on to several servers: by load, by prompts sent before, or by their KV events"
KEYS = (
    "a router passes the keys of clients on, and the backends check them (`quire serve --api-key`): for limits at the "
    "router give --api-key-file"
)
OWN = (
    "host port uds allowed_hosts ssl_keyfile ssl_certfile max_body_bytes max_header_bytes max_headers web api_key_file "
    "access_log disable_access_log_for_endpoints log_format log_level otlp_traces_endpoint otlp_traces_sample_rate"
).split()  # options of `quire serve` that a router has, too


def configure(parser: flags.FlagParser) -> None:
    """Add the flags of `quire route`."""
    from quire import router

    parser.elsewhere = {"--api-key": KEYS, "": "servers are named by --backend URL"}
    parser.add_argument("--check", action="store_true", help=CHECK.format("API keys, certificate, backends and state"))
    flags.add_flag_table(parser, Path(router.__file__).with_name("flags.txt"))
    options = flags.options_of(HttpConfig, AccessConfig, LogConfig, TracingConfig)
    flags.add_flags(parser, ((title, option) for title, option in options if option.name in OWN))


def run(args: argparse.Namespace) -> int:
    """Route until a signal comes. Exit code 0 after a clean stop."""
    config, given = router_config(vars(args)), flags.settings_of(args, server=True).values
    server = ServerConfig.from_flat(**{name: given[name] for name in OWN if name in given})
    if server.access.api_key_file is None:
        refuse_empty((variable("api_key_file"),), "this router would have no keys and no limits")
    if args.check:
        from quire.entry.http.access.files import check_files
        from quire.router.check import check_router_files

        print("\n".join([*check_files(server, by_priority=True), *check_router_files(config)]))
        return DONE
    from quire.entry.http.server import run_loop

    with log_written_apart(partial(lost_lines, log_format=server.log.log_format)):
        set_up_logging(server.log.log_format, "router", NoticeFormatter())
        LOG.setLevel(server.log.level)
        raise_on_interrupt()
        return run_loop(_route(config, server))


async def _route(config: RouterConfig, server: ServerConfig) -> int:
    """Pass requests on until a signal comes, let the running ones finish, and return the exit code."""
    from quire.entry.http.access.front import guarded, operated
    from quire.entry.http.access.routed_log import RoutedLog
    from quire.entry.http.listener import HttpListener
    from quire.entry.http.observed.reloads import counted
    from quire.entry.http.observed.request_lines import AccessLog
    from quire.entry.http.server import FLUSH_GRACE, first_of, settle_memory
    from quire.entry.http.sockets import listen, release, url_of
    from quire.entry.signals import OperatorSignals, StopRequests
    from quire.observe.process import collect_garbage
    from quire.router.app import RouterApp

    router = RouterApp(config, web=server.http.web, tracing=server.tracing)
    admin = HttpConfig(port=config.admin_port or 0)
    app, reload = guarded(router, server)
    log = AccessLog(server.log, "router")
    app = RoutedLog(app, log)
    sides = [(app, server.http)]
    if config.admin_port is not None:
        sides.append((operated(router.operate, admin.host), admin))
    with ExitStack() as stack, StopRequests() as stop:
        listeners = []
        for app, address in sides:
            stack.callback(release, socket := listen(address), address)
            listeners.append(HttpListener(app, address, socket, router.refused, files=2, log=log))
        if server.http.ssl_certfile is not None:
            reload["certificate"] = listeners[0].reload_certificate
            router.metrics.certificate_end = lambda: listeners[0].certificate_end
        found = [watch.now for watch in router.watches if watch.source.must]
        again = [*counted(reload, router.metrics.reloads), *found]
        stack.enter_context(OperatorSignals(again, lambda number: None, LOG.info, server.log.level))
        await router.start()
        settle_memory()
        collecting = asyncio.create_task(collect_garbage())
        purposes = (f"{config.choice.policy}, backends: {len(router.own)}", "operators")
        for listener, (_, address), purpose in zip(listeners, sides, purposes, strict=False):
            listener.start()
            LOG.info("listening on %s (%s)", url_of(listener.socket, address), purpose)
        first, second = (asyncio.create_task(event.wait()) for event in (stop.first, stop.second))
        await first_of(first, *(listener.serving for listener in listeners))
        router.drain()
        LOG.info(
            "%s: no new requests; running ones (%d) have %g s to finish. A second signal ends at once.",
            stop.name,
            router.num_live,
            config.shutdown_timeout,
        )
        late = asyncio.create_task(asyncio.sleep(config.shutdown_timeout))
        await first_of(second, late, asyncio.create_task(router.idle()))
        for listener in listeners:
            await listener.stop(FLUSH_GRACE)
        collecting.cancel()
        await router.close()
        return (stop.code if second.done() else DONE) if first.done() else FAILED

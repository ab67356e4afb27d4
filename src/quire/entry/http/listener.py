"""uvicorn inside our process: on our socket and event loop, without its signal handlers, logs and environment."""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from quire.config.serve import HttpConfig
from quire.contracts.errors import ConfigError
from quire.entry.http.access.certificate import check_certificate, end_of
from quire.entry.http.access.doorway import Doorway
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.protocol import NO_LOG, ConnectionLimits, LimitedProtocol, Traffic
from quire.entry.http.sockets import BACKLOG, max_connections

KEEP_ALIVE = 75  # seconds an idle connection is kept: longer than the usual proxy's 60, so that the proxy closes first


class _Server(uvicorn.Server):
    most: int  # connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Override a method of uvicorn: install no signal handlers, because Quire's server has its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Override a method of uvicorn: count and time handshakes."""
        await super().startup([])
        protocol: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        state = self.server_state
        make = functools.partial(protocol, config=self.config, server_state=state, app_state=self.lifespan.state)
        for each in sockets or ():
            accept = functools.partial(Doorway, make, each, self.config.ssl, self.config.backlog)
            self.servers.append(accept(lambda: self.most - len(state.connections)))  # type: ignore[arg-type]


class HttpListener:
    """Accepts connections on a listening socket and gives their requests to an application.
    Raises `ConfigError` when the certificate cannot be used.
    refused  called with the status of each response that the protocol sends before any route
    shared   other processes accept on the socket, too: take one connection per turn, so that each gets its share
    files    open files that a connection may need
    log      of requests: it has a line of each of these responses, too"""

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        listener: socket.socket,
        refused: Callable[[int], None],
        *,
        shared: bool = False,
        files: int = 1,
        log: AccessLog = NO_LOG,
    ) -> None:
        self.socket = listener
        limits = ConnectionLimits.of(config, max_connections=max_connections(files))
        traffic = Traffic(refused, log)
        # The application and the protocol log the errors themselves; uvicorn's other messages are routine.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        settings = uvicorn.Config(
            app,
            http=functools.partial(LimitedProtocol, limits=limits, traffic=traffic),  # type: ignore[arg-type]
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            workers=1,
            backlog=1 if shared else BACKLOG,
            proxy_headers=False,
            forwarded_allow_ips=[],
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
        )
        check_certificate(config)
        settings.load()
        self._settings, self._config = settings, config
        self.certificate_end = None if config.ssl_certfile is None else end_of(config.ssl_certfile)
        self._server = _Server(settings)
        self._server.most = limits.max_connections
        self._begun = False
        self.serving: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Start to serve; idempotent. From now on `serving` ends when the listener stops or fails."""
        if not self._begun:
            self._begun, self.serving = True, asyncio.create_task(self._server.serve(sockets=[self.socket]))

    def reload_certificate(self) -> str:
        """Read certificate and key again, for new connections. Return a sentence for the operator. Raises `ConfigError`
        for files that cannot be used; then the certificate stays as it was."""
        certificate, key = self._config.ssl_certfile, self._config.ssl_keyfile
        assert self._settings.ssl is not None and certificate is not None
        try:
            check_certificate(self._config)
        except ConfigError as error:
            raise ConfigError(f"The certificate stays as it was: {error}") from None
        self._settings.ssl.load_cert_chain(certificate, key)
        self.certificate_end = end_of(certificate)
        return f"The certificate is read again from {certificate}."

    async def stop(self, grace: float) -> None:
        """Accept no more connections. Responses in progress get `grace` seconds, then they are cut off. Idempotent."""
        if not self._begun:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self.serving}, timeout=grace)
        if not done:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self.serving}, timeout=grace)

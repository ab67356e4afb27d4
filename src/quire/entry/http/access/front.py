"""The application in front of a router: names, keys and the page, as `app.py` puts them in front of an engine."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp

from quire.config.serve import ServerConfig, is_loopback
from quire.entry.http.access.auth import ApiKeys, Guard, OwnNames, json_only
from quire.entry.http.access.keyring import Keyring
from quire.entry.http.access.limits import KeyCounts, KeyLimits, KeyTable
from quire.entry.http.access.rate_limits import RateLimits
from quire.entry.http.access.routed import RouterGate, left_to_engines
from quire.entry.http.web.page import ServesPage

LOG = logging.getLogger("quire")


class RoutedApp(Protocol):
    """A router that asks a gate for the limits of callers. `traced`: the application."""

    gate: Any
    traced: Any

    @property
    def metrics(self) -> KeyCounts:
        """Its counters."""


def guarded(router: RoutedApp, server: ServerConfig) -> tuple[ASGIApp, dict[str, Callable[[], str]]]:
    """Return a router behind the checks of names and keys, and functions that read files of these again, by name."""
    http, reload = server.http, dict[str, Callable[[], str]]()
    app: ASGIApp = router.traced
    if server.access.keyed:
        keyring, limits = Keyring(server.access, by_priority=True), KeyLimits(KeyTable, router.metrics)
        if words := left_to_engines(keyring):
            LOG.info("%s", words)
        router.gate = RouterGate(limits)
        app = Guard(RateLimits(app, limits), ApiKeys(keyring))
        reload["keys"] = keyring.reload
    elif http.uds is None and not is_loopback(http.host):
        LOG.warning(
            "everyone who can reach %s:%d can use the backends, unless these check API keys: set "
            "--host 127.0.0.1, keys there, or --api-key-file here.",
            http.host,
            http.port,
        )
    if http.web:
        app = Guard(app, ServesPage())
    # A web page may reach a loopback address under a name of its own: see `OwnNames`.
    if http.uds is None and is_loopback(http.host) and "*" not in http.allowed_hosts and not server.access.keyed:
        app = Guard(app, OwnNames(http.host, http.allowed_hosts, keyed=False))
    return app, reload


def operated(app: ASGIApp, host: str) -> ASGIApp:
    """Return the operators' side of a router behind the checks of names and of bodies."""
    return Guard(Guard(app, json_only), OwnNames(host, keyed=False))

"""A listening socket that several processes share: each takes one connection per turn, and the queue stays long. The
files that a server reads again."""

import asyncio
import logging
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.config.serve import HttpConfig
from quire.contracts.errors import ConfigError
from quire.entry.http.access.certificate import check_certificate
from quire.entry.http.listener import HttpListener
from quire.entry.http.observed.reloads import counted
from quire.entry.signals import OperatorSignals
from quire.observe.series import Tally
from quire.procs.held_signals import hold

COUNT = 40


async def never(scope: object, receive: object, send: object) -> None: ...


@pytest.mark.parametrize("shared", [False, True])
def test_connections_that_come_at_once(shared: bool) -> None:
    async def work() -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            listener = HttpListener(never, HttpConfig(), listening, print, shared=shared)
            listener.start()
            while not listener._server.started:
                await asyncio.sleep(0)
            for _ in range(COUNT):  # nobody accepts meanwhile: all find a place in the queue
                stack.enter_context(socket.create_connection(listening.getsockname(), timeout=10))
            accepted = [0]
            while accepted[-1] < COUNT:
                await asyncio.sleep(0)
                accepted.append(len(listener._server.server_state.connections))
            await listener.stop(0.0)
            return [after - before for before, after in zip(accepted, accepted[1:], strict=False)]

    most = max(asyncio.run(asyncio.wait_for(work(), 60)))
    assert most <= 2 if shared else most > 2  # an accept per turn; Python 3.12 makes one more


def test_the_file_of_a_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    (there := tmp_path / "there.pem").touch()
    for files in (
        {"ssl_certfile": str(there), "ssl_keyfile": "no.pem"},
        {"ssl_certfile": "no.pem", "ssl_keyfile": str(there)},
    ):
        (missing,) = (name for name, file in files.items() if file == "no.pem")
        with pytest.raises(ConfigError, match=f"^{missing}='no.pem' cannot be read: No such file or directory"):
            check_certificate(HttpConfig(**files))


def test_a_refused_reload_is_an_error_and_both_results_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> str:
        raise ConfigError("The API keys stay as they were: planted.")

    async def work() -> None:
        told, reloads = list[str](), Tally()
        reload = counted({"keys": refuse, "certificate": lambda: "It is read again."}, reloads)
        hold()
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)  # while the process starts: the files are read later
        with OperatorSignals([*reload], lambda number: None, told.append, logging.INFO):
            while len(reloads.counts) < 2 or not told or not caplog.records:
                await asyncio.sleep(0)
        assert told == ["It is read again."]
        assert reloads.counts == {("keys", "refused"): 1, ("certificate", "done"): 1}

    asyncio.run(asyncio.wait_for(work(), 60))
    ((_, level, words),) = caplog.record_tuples
    assert level == logging.ERROR and words == "The API keys stay as they were: planted."

"""The agent of a host: connects to the engine's first host, starts ranks when it is told to, and reports their ends.

It ends its ranks when the first host ends, or is silent for too long. Knows sockets and processes, nothing of models.
"""

import select
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from quire.config.env import rank_variables
from quire.contracts.errors import ConfigError, EngineDead
from quire.procs.child_process import ChildProcess
from quire.procs.frames import Frames
from quire.procs.host_link import RETRY_SECONDS, NotMaster, connect, interface_of
from quire.ranks.host_messages import (
    TO_HOST,
    FromHost,
    HostBeat,
    HostHello,
    KillRank,
    Leave,
    Leaving,
    RankEnded,
    RankHello,
    RankStarted,
    StartRank,
    ToHost,
    encode_for_host,
)
from quire.ranks.launchers import LocalLauncher

TICK_SECONDS = 0.05  # between two looks at the ranks
BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0  # longest silence of the other end
JOIN_SECONDS = 1800.0  # to find the first host, which may have a model to download before it listens
CONNECT_SECONDS = 20.0  # to open the connection of a rank; a try may fail, as strangers use the port, too
WAITING_SECONDS = 5.0  # after which a host that waits for another one says so


class HostAgent:
    """The agent of a host. One thread uses it.

    address, port   of the engine's first host
    hello           facts about this host
    module          name of the Python module that builds a rank; see `LocalLauncher`
    env             environment variables that ranks have besides those of this process
    say             prints a line for the user
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        hello: HostHello,
        module: str,
        *,
        env: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._place, self._key, self._hello, self._module = (address, port), key, hello, module
        self._env, self._say = env, say
        self._ranks: dict[int, ChildProcess] = {}
        self._told_to_end: set[int] = set()  # ranks that the first host has killed
        self._failed = False  # True after a rank ended by itself with an error

    def run(self, stop: Callable[[], str] = lambda: "", seconds: float = JOIN_SECONDS) -> bool:
        """Serve until the first host has ended the engine. Return True when no rank of this host has failed.

        stop      returns the reason to end now, "" for none;  seconds  to find the first host
        Raises `ConfigError` if the first host does not take this one, `EngineDead` when it is lost.
        """
        connection = self._join(stop, seconds)
        if connection is None:
            return True
        own = connection.getsockname()[0]
        launcher = LocalLauncher(self._module, {**self._env, **rank_variables(interface_of(own))})
        frames = Frames(connection)
        try:
            return self._serve(frames, launcher, stop)
        finally:
            for child in self._ranks.values():
                child.kill()
            for child in self._ranks.values():
                child.release()
            frames.close()

    def _join(self, stop: Callable[[], str], seconds: float) -> socket.socket | None:
        """Connect to the first host, again and again until it listens. Return None after `stop`."""
        address, port = self._place
        begun, said = time.monotonic(), False
        while not stop():
            try:
                return connect(address, port, self._key, encode_for_host(self._hello))
            except (OSError, NotMaster) as error:
                waited = time.monotonic() - begun
                why = error.strerror if isinstance(error, OSError) and error.strerror else error
            if waited >= seconds:
                raise EngineDead(
                    f"no engine was found on {address}:{port} in {seconds:.0f} s ({why}): start the host "
                    "with --node-rank 0, and check --master-addr, --master-port and the firewall."
                )
            if waited >= WAITING_SECONDS and not said:
                said = True
                self._say(f"waiting for the engine on {address}:{port} ({why}).")
            time.sleep(RETRY_SECONDS)
        return None

    def _serve(self, frames: Frames, launcher: LocalLauncher, stop: Callable[[], str]) -> bool:
        poller = select.poll()
        poller.register(frames.fileno(), select.POLLIN)
        joined = False
        looked = heard = time.monotonic()
        next_beat = 0.0
        while True:
            if why := stop():
                self._send(frames, Leaving(why))
                self._say(f"this host {why}, and has left the engine with its ranks.")
                return True
            arrived = poller.poll(1000 * TICK_SECONDS)
            now = time.monotonic()
            if now - looked > SILENT_SECONDS / 2:  # this process was stopped: the messages wait in the socket
                heard = now
            looked = now
            if arrived:
                heard = now
                for message in self._received(frames):
                    if isinstance(message, Leave):
                        return self._left(message)
                    if not joined:
                        joined = True
                        place = ":".join(map(str, self._place))
                        self._say(f"{self._hello.words} has joined the engine on {place}.")
                    self._obey(message, frames, launcher)
            elif now - heard >= SILENT_SECONDS:
                raise self._lost(f"has sent nothing for {now - heard:.0f} s")
            self._report(frames)
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._send(frames, HostBeat(tuple(number for number, child in self._ranks.items() if child.stopped())))

    def _received(self, frames: Frames) -> list[ToHost]:
        try:
            return list(map(TO_HOST.decode, frames.receive()))
        except EOFError:
            raise self._lost("is gone") from None
        except msgspec.DecodeError as error:
            raise self._lost(f"sent a message that this host cannot read ({error})") from None

    def _left(self, message: Leave) -> bool:
        if message.why:
            raise ConfigError(f"the engine on {self._place[0]}:{self._place[1]} does not take this host: {message.why}")
        self._say("the engine has ended.")
        return not self._failed

    def _lost(self, how: str) -> EngineDead:
        return EngineDead(f"the engine on {self._place[0]}:{self._place[1]} {how}: the ranks of this host were ended.")

    def _obey(self, message: ToHost, frames: Frames, launcher: LocalLauncher) -> None:
        if isinstance(message, StartRank):
            try:
                with self._connect(RankHello(message.token)) as connection:
                    child = launcher.run(connection)
            except (OSError, NotMaster) as error:
                self._send(frames, RankEnded(message.number, f"could not be started: {error}"))
                return
            self._ranks[message.number] = child
            self._send(frames, RankStarted(message.number, child.pid))
        elif isinstance(message, KillRank) and message.number in self._ranks:
            self._told_to_end.add(message.number)
            self._ranks[message.number].kill()

    def _connect(self, hello: RankHello) -> socket.socket:
        """Open the connection of a rank. Try again, unless nobody listens: then the first host is gone."""
        until = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                return connect(*self._place, self._key, encode_for_host(hello))
            except ConnectionRefusedError:
                raise
            except (OSError, NotMaster):
                if time.monotonic() >= until:
                    raise
            time.sleep(RETRY_SECONDS)

    def _report(self, frames: Frames) -> None:
        """Tell the first host which ranks have ended."""
        for number, child in list(self._ranks.items()):
            if (how := child.ended()) is not None:
                del self._ranks[number]
                self._failed |= number not in self._told_to_end and how != "exited with code 0"
                self._send(frames, RankEnded(number, how))

    def _send(self, frames: Frames, message: FromHost) -> None:
        try:
            frames.send(encode_for_host(message))
        except OSError:
            pass  # the next `receive` says that the first host is gone

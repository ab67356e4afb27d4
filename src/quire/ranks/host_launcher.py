"""Ranks on several hosts: a launcher that has a connection to the agent of each other host.

The agents connect to this process, prove that they know the key, and start ranks when they are told to. A connection
for each rank follows: plans go straight to the ranks. One thread takes new connections, reads what agents report, and
notices agents that are gone or silent. Knows sockets and hosts, nothing of models.
"""

import logging
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import msgspec

from quire.contracts.errors import ConfigError, EngineDead
from quire.procs.child_process import REAP_SECONDS
from quire.procs.frames import Frames
from quire.procs.host_link import NotMaster, welcome
from quire.ranks.agent import BEAT_SECONDS, SILENT_SECONDS, WAITING_SECONDS
from quire.ranks.host_messages import (
    FROM_HOST,
    HELLO,
    FromHost,
    HostBeat,
    HostHello,
    KillRank,
    Leave,
    Leaving,
    RankStarted,
    StartRank,
    ToHost,
    encode_for_host,
)
from quire.ranks.launchers import LocalLauncher, Place, StartedRank
from quire.ranks.members import Members

LOG = logging.getLogger("quire").getChild("hosts")
TICK_SECONDS = 0.1
START_SECONDS = 60.0  # for an agent to start a process
MOST_NEW = 64  # connections that are proving their key at the same time; an older one gives way to a further one
GONE_SECONDS = 5.0  # silence after which an agent gives way to one that comes for the same host


class Hosts:
    """Launcher of ranks on several hosts; see `Launcher`. It closes itself when the last rank of other hosts has ended.

    local      starts the ranks of this host
    listener   socket on which agents connect;  key  that they must know
    members    the hosts to wait for
    address    of this host, by which the other hosts reach it
    """

    def __init__(self, local: LocalLauncher, listener: socket.socket, key: bytes, members: Members) -> None:
        self._local, self._listener, self._key, self._members = local, listener, key, members
        self.address: str = listener.getsockname()[0]
        self._changed = threading.Condition()  # guards the fields below
        self._agents: dict[int, _Agent] = {}  # by `Members.key`
        self._placed = False  # True: the ranks have their places, and no host can be replaced
        self._owners: dict[int, _Agent] = {}  # rank of another host -> its agent
        self._tokens: dict[bytes, int] = {}  # of ranks that have not connected -> their numbers
        self._connected: dict[int, socket.socket] = {}
        self._unreleased: set[int] = set()  # ranks of other hosts
        self._last_words = ""  # about a host that was not taken
        self._closed = False
        self._ending = ExitStack()
        self._new: dict[socket.socket, str] = {}  # connections that are proving their key -> address; oldest first
        self._thread = threading.Thread(target=self._run, name="quire-hosts", daemon=True)
        self._thread.start()

    def keep(self, thing: object) -> None:
        """Hold an object until the ranks have ended."""
        self._ending.callback(lambda kept: None, thing)

    def on_close(self, call: Callable[[], object]) -> None:
        """Call a function after the ranks have ended and the agents were told."""
        self._ending.callback(call)

    def place(self, world: int) -> Sequence[Place]:
        """Wait for all hosts. Give each of them the consecutive ranks that it says, or the same number of them."""
        self._wait_for_hosts()
        places, owners = list[Place](), dict[int, _Agent]()
        names: dict[str, int] = {}  # of different hosts; agents with the same name are on one host
        for key, each in self._members.shares(world, self._here()):
            agent = None if key is None else self._agents.get(key)
            hello = None if agent is None else agent.hello
            host = names.setdefault(hello.name if hello else "", len(names))
            devices: Sequence[int] = range(each)
            if agent is not None:
                owners |= dict.fromkeys(range(len(places), len(places) + each), agent)
            if hello is not None and self._members.gpus:
                devices = hello.devices
            if len(devices) < each:
                raise ConfigError(
                    f"{each} ranks would run on {hello and hello.name}, which has {len(devices)} GPUs: "
                    "use more hosts (--nnodes), lower sizes, or make more GPUs visible there "
                    "(CUDA_VISIBLE_DEVICES)."
                )
            folders, address = hello.files.folders if hello else (), agent.address if agent else ""
            places += [Place(host, devices[index], folders, address) for index in range(each)]
        self._owners = owners
        return places

    def start(self, numbers: Sequence[int], inherit: Sequence[int] = ()) -> list[StartedRank]:
        """Start the processes of these ranks on their hosts, or none of them. Waits until they have connected."""
        started: dict[int, StartedRank] = {}
        remote = {
            number: _HostedRank(number, self._owners[number], self) for number in numbers if number in self._owners
        }
        try:
            with self._changed:
                for number, rank in remote.items():
                    token = secrets.token_bytes(32)
                    self._tokens[token] = number
                    self._unreleased.add(number)
                    rank.agent.ranks[number] = rank
                    rank.agent.send(StartRank(number, token))
            for number in numbers:
                if number not in remote:
                    (started[number],) = self._local.start((number,), inherit)
            for number, rank in remote.items():
                frames = Frames(self._wait_for_rank(rank))
                started[number] = StartedRank(rank, frames, rank.agent.hello.name)
        except BaseException:
            for one in started.values():
                one.process.kill()
                one.frames.close()
            for rank in remote.values():
                rank.kill()
            for process in (*(one.process for one in started.values()), *remote.values()):
                process.release(REAP_SECONDS)
            raise
        return [started[number] for number in numbers]

    def close(self) -> None:
        """Tell the agents that the engine has ended, and free everything; idempotent."""
        with self._changed:
            self._closed = True
        if self._thread.ident != threading.get_ident():
            self._thread.join()
        with self._changed:
            ending = self._ending.pop_all()
        ending.close()

    def released(self, number: int) -> None:
        """Note that nobody watches this rank any more. The last one closes the launcher."""
        with self._changed:
            self._unreleased.discard(number)
            over = not self._unreleased
        if over:
            self.close()

    def _wait_for_hosts(self) -> None:
        begun, said, members = time.monotonic(), "", self._members
        with self._changed:
            while words := members.missing(self._here()):
                waited = time.monotonic() - begun
                place = "{}:{}".format(*self._listener.getsockname()[:2])
                if fault := members.fault():
                    raise EngineDead(fault)
                if waited >= members.seconds:
                    own = "its --node-rank and the same --nnodes"
                    if members.own is not None:
                        own = "its --data-parallel-start-rank and --data-parallel-size-local, the same"
                    raise EngineDead(
                        f"{words} has not connected to {place} in {waited:.0f} s"
                        f"{self._last_words and f' ({self._last_words})'}: start `quire serve MODEL "
                        f"--headless` there with {own}, --master-addr and --master-port."
                    )
                if waited >= WAITING_SECONDS and said != words:
                    said = words
                    LOG.warning("waiting for %s on %s.", words, place)
                self._changed.wait(TICK_SECONDS)
            self._placed = True

    def _here(self) -> dict[int, HostHello]:
        """Return the hosts that have connected, and are not lost."""
        return {key: agent.hello for key, agent in self._agents.items() if not agent.lost}

    def _wait_for_rank(self, rank: "_HostedRank") -> socket.socket:
        until = time.monotonic() + START_SECONDS
        with self._changed:
            while rank.number not in self._connected or not rank.pid:
                how = rank.ended() or (time.monotonic() >= until and f"did not start in {START_SECONDS:.0f} s")
                if how:
                    raise EngineDead(f"rank {rank.number} on {rank.agent.hello.name} {how}.")
                self._changed.wait(TICK_SECONDS)
            self._tokens = {token: number for token, number in self._tokens.items() if number != rank.number}
            return self._connected.pop(rank.number)

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as fault:  # a fault of ours: no caller may wait for ever
            LOG.exception("the watch over the hosts failed")
            for agent in self._agents.values():
                agent.lost = agent.lost or f"was lost: {type(fault).__name__}: {fault}"
        self._free()

    def _serve(self) -> None:
        next_beat = looked = 0.0
        while not self._closed:
            poller = select.poll()
            poller.register(self._listener.fileno(), select.POLLIN)
            reading = {agent.frames.fileno(): agent for agent in list(self._agents.values()) if not agent.lost}
            for descriptor in reading:
                poller.register(descriptor, select.POLLIN)
            for agent in reading.values():
                agent.flush()
            ready = [descriptor for descriptor, _ in poller.poll(1000 * TICK_SECONDS)]
            now = time.monotonic()
            with self._changed:
                for descriptor in ready:
                    if descriptor in reading:
                        self._read(reading[descriptor], now)
                    else:
                        self._accept()
                for agent in self._agents.values():
                    if now - looked > SILENT_SECONDS / 2:  # this process was stopped
                        agent.heard = now
                    if not agent.lost and now - agent.heard >= SILENT_SECONDS:
                        agent.lost = f"was lost: its agent has sent nothing for {now - agent.heard:.0f} s"
                    if now >= next_beat:
                        agent.send(HostBeat())
                next_beat = now + BEAT_SECONDS if now >= next_beat else next_beat
                looked = now
                self._changed.notify_all()

    def _free(self) -> None:
        self._listener.close()
        with self._changed:
            for agent in self._agents.values():
                agent.send(Leave())
                agent.lost = agent.lost or "was left"
                agent.frames.close()
            for connection in self._connected.values():
                connection.close()
            self._connected.clear()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return  # the peer is gone already
        if len(self._new) >= MOST_NEW:  # a stranger cannot keep the hosts out
            counts = Counter(self._new.values())
            oldest = max(self._new, key=lambda one: counts[self._new[one]])  # of the address with most
            del self._new[oldest]
            with suppress(OSError):  # its thread has just closed it
                oldest.shutdown(socket.SHUT_RDWR)
        self._new[connection] = peer[0]
        threading.Thread(target=self._meet, args=(connection, peer[0]), name="quire-host-new", daemon=True).start()

    def _meet(self, connection: socket.socket, peer: str) -> None:
        """Take a new connection, if its peer knows the key."""
        try:
            hello = HELLO.decode(welcome(connection, self._key))
        except (OSError, NotMaster, msgspec.DecodeError) as error:
            words = f"refused a connection from {peer}: {error}"
            with self._changed:
                self._new.pop(connection, None)
                if words != self._last_words:
                    LOG.warning("%s.", words)
                self._last_words = words
            connection.close()
            return
        with self._changed:
            self._new.pop(connection, None)
            if isinstance(hello, HostHello):
                self._take(_Agent(hello, Frames(connection), peer))
            elif not self._closed and (number := self._tokens.get(hello.token)) is not None:
                if (former := self._connected.pop(number, None)) is not None:  # its agent has tried again
                    former.close()
                self._connected[number] = connection
            else:
                connection.close()
            self._changed.notify_all()

    def _take(self, agent: "_Agent") -> None:
        hello, members = agent.hello, self._members
        key = members.key(hello)
        former = self._agents.get(key)
        why, gone = "", former is not None and (former.lost or agent.heard - former.heard >= GONE_SECONDS)
        if misfit := members.misfit(hello, self._here()):
            why = misfit
        elif former is not None and gone and self._placed:
            why = (
                f"the ranks of {hello.words} have ended, and the engine takes no host in their place: start the "
                "engine again"
            )
        elif former is not None and not gone:
            flag = "--node-rank" if members.own is None else "--data-parallel-start-rank"
            why = f"{hello.words} is {former.hello.name} already: give each host its {flag}"
        elif hello.versions != members.versions:
            why = f"it has {hello.versions}, and the first host has {members.versions}: install the same versions"
        elif hello.files.digest != members.model:
            why = "its model has other files than that of the first host: give the same model, drafter and revisions"
        elif self._closed:
            why = "the engine has ended"
        if why:
            self._last_words = f"{hello.name} was not taken: {why}"
            LOG.warning("%s (%s).", self._last_words, agent.address)
            agent.send(Leave(why))
            agent.frames.close()
        else:
            if former is not None:
                former.lost = former.lost or "was replaced"
                former.frames.close()
            self._agents[key] = agent

    def _read(self, agent: "_Agent", now: float) -> None:
        """Take the messages of an agent that have arrived."""
        try:
            messages: list[FromHost] = list(map(FROM_HOST.decode, agent.frames.receive()))
        except EOFError:
            agent.lost = "was lost: its agent closed the connection"
            return
        except msgspec.DecodeError as error:
            agent.lost = f"was lost: its agent sent what is no message ({error})"
            return
        agent.heard = now
        for message in messages:
            if isinstance(message, HostBeat):
                agent.stopped = message.stopped
            elif isinstance(message, Leaving):
                agent.lost = f"was lost: its agent {message.why}"
            elif (rank := agent.ranks.get(message.number)) is None:
                continue
            elif isinstance(message, RankStarted):
                rank.pid = message.pid
            else:
                rank.how = message.how


@dataclass
class _Agent:
    """The agent of a host, as this process sees it. `lost`: the reason why it is gone; "" while it is there."""

    hello: HostHello
    frames: Frames
    address: str
    heard: float = field(default_factory=time.monotonic)
    ranks: "dict[int, _HostedRank]" = field(default_factory=dict)
    stopped: tuple[int, ...] = ()
    lost: str = ""

    def send(self, message: ToHost) -> None:
        """Send a message without waiting. An agent that cannot take it is found to be silent."""
        if not self.lost:
            with suppress(OSError):  # it is gone: its reader says so
                self.frames.post(encode_for_host(message))

    def flush(self) -> None:
        """Send the messages that found no room before."""
        with suppress(OSError):
            self.frames.flush()


class _HostedRank:
    """The process of a rank on another host; see `RankProcess`. `pid` is 0 before it has started."""

    def __init__(self, number: int, agent: _Agent, hosts: Hosts) -> None:
        self.number, self.agent, self._hosts = number, agent, hosts
        self.pid, self.how = 0, ""

    def ended(self) -> str | None:
        """Return the way the process ended; None while it runs. A rank ends with its agent."""
        return self.how or self.agent.lost or None

    def stopped(self) -> bool:
        """True when a signal or a debugger holds the process, by the last report of its agent."""
        return self.number in self.agent.stopped

    def kill(self) -> None:
        """Tell its agent to send SIGKILL."""
        if self.ended() is None:
            self.agent.send(KillRank(self.number))

    def release(self, seconds: float = REAP_SECONDS) -> None:
        """Wait at most `seconds` for the process to end."""
        until = time.monotonic() + seconds
        while self.ended() is None and time.monotonic() < until:
            time.sleep(0.01)
        self._hosts.released(self.number)

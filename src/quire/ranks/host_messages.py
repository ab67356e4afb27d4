"""Messages between the first host of an engine (the master) and the agents of its other hosts, in msgpack.

    first words      HostHello of an agent; RankHello on a connection that is for a rank
    to an agent      StartRank, KillRank, HostBeat, Leave
    from an agent    RankStarted, RankEnded, HostBeat, Leaving

No message names code, a command or a variable: an agent starts ranks of Quire and nothing else.
"""

import msgspec


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model and of its draft model or EAGLE head on a host.

    digest    `model_digest` of their folders
    folders   of the model, and of its drafter, if it has one; (): the same as on the first host
    """

    digest: str = ""
    folders: tuple[str, ...] = ()


class HostHello(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """First words of an agent.

    node       index of its host, 1 and up; with Ray the index of the rank that it starts
    name       name of its host, for messages
    ranks      its first rank, and how many it has; (0, 0): the first host gives all hosts equally many
    versions   of Quire and PyTorch, which all hosts have alike
    devices    indices of the GPUs that its ranks may use, in order; (): no GPU
    files      files of the model on its host
    """

    node: int
    name: str
    versions: str
    devices: tuple[int, ...] = ()
    files: ModelFiles = ModelFiles()
    ranks: tuple[int, int] = (0, 0)

    @property
    def words(self) -> str:
        """The host in messages, such as "node 1"."""
        first, count = self.ranks
        return f"the host of ranks {first} to {first + count - 1}" if count else f"node {self.node}"


class RankHello(msgspec.Struct, frozen=True, tag="rank"):
    """First words on a connection that an agent opened for a rank. `token`: of its `StartRank`, valid once."""

    token: bytes


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """Start the process of a rank, with a connection of its own to the first host."""

    number: int
    token: bytes


class KillRank(msgspec.Struct, frozen=True, tag="kill"):
    """Send SIGKILL to a rank."""

    number: int


class HostBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat in both directions. `stopped`: numbers of an agent's ranks that a signal or a debugger has stopped."""

    stopped: tuple[int, ...] = ()


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Last message to an agent. `why`: the reason why the master does not take this host; "": the engine has ended."""

    why: str = ""


class RankStarted(msgspec.Struct, frozen=True, tag="started"):
    """A rank runs, with this process id."""

    number: int
    pid: int


class RankEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A rank has ended, or was not started. `how`: "was killed by SIGKILL"."""

    number: int
    how: str


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Last message of an agent that ends. `why`: "was ended by SIGTERM"."""

    why: str


ToHost = StartRank | KillRank | HostBeat | Leave
FromHost = RankStarted | RankEnded | HostBeat | Leaving

HELLO: msgspec.msgpack.Decoder[HostHello | RankHello] = msgspec.msgpack.Decoder(HostHello | RankHello)
TO_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
encode_for_host = msgspec.msgpack.Encoder().encode

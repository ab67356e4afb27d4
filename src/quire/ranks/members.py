"""The hosts of an engine: which ranks each of them has, and what is missing or does not fit."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from quire.ranks.agent import JOIN_SECONDS
from quire.ranks.host_messages import HostHello

Here = Mapping[int, HostHello]  # hosts that have connected, by `Members.key`


class Members(NamedTuple):
    """The hosts that an engine waits for.

    first      index of the first host that must connect: 1 when this process's host is host 0, 0 when all connect
    total      number of hosts, this one included
    versions, model   that the hosts must have; see `HostHello`
    gpus       True when every rank needs a GPU
    seconds    to wait for all hosts
    fault      returns the reason why a host will not come; "" while all may
    own        number of the first ranks, which are on this process's host, where each host says which ranks it has.
               None: all hosts have equally many
    world      number of all ranks; 0: not known before `place`
    """

    first: int
    total: int
    versions: str
    model: str
    gpus: bool
    seconds: float = JOIN_SECONDS
    fault: Callable[[], str] = str
    own: int | None = None
    world: int = 0

    def ranks_of(self, hello: HostHello) -> range:
        """Return the ranks that an agent's host says it has, or those of one of equal hosts."""
        first, count = hello.ranks
        each = self.world // self.total
        return range(first, first + count) if count else range(hello.node * each, (hello.node + 1) * each)

    def key(self, hello: HostHello) -> int:
        """Return the number under which a host is known: its index, or that of its first rank."""
        return hello.node if self.own is None else self.ranks_of(hello).start

    def shares(self, world: int, here: Here) -> Iterator[tuple[int | None, int]]:
        """Yield the key of each host and the number of its ranks, in the order of the ranks; None: this process's host.

        world   number of all ranks, of which all hosts that connect have equally many if `own` is None
        """
        if self.own is None:
            each = world // self.total
            assert each * self.total == world, "checked before"
            yield from ((node if node in here else None, each) for node in range(self.total))
            return
        if self.own:
            yield None, self.own
        yield from ((key, len(self.ranks_of(here[key]))) for key in sorted(here))

    def missing(self, here: Here) -> str:
        """Return words for the hosts that have not connected, such as "node 2 of 3"; "": all have."""
        if self.own is None:
            missing = [str(one) for one in range(self.first, self.total) if one not in here]
            return f"node {', '.join(missing)} of {self.total}" if missing else ""
        have = {*range(self.own), *(rank for hello in here.values() for rank in self.ranks_of(hello))}
        lacks = [rank for rank in range(self.world) if rank not in have]
        return f"the host of rank {lacks[0]} of {self.world}" if lacks else ""

    def misfit(self, hello: HostHello, here: Here) -> str:
        """Return the reason why the ranks of a host do not fit those of the others; "": they do."""
        ranks = self.ranks_of(hello)
        words = f"it has ranks {ranks.start} to {ranks.stop - 1}"
        if self.own is None:
            if not self.first <= hello.node < self.total:
                return f"it is node {hello.node}, and the other nodes are {self.first} to {self.total - 1}"
            each = self.world // self.total
            equal = not hello.ranks[1] or ranks == range(hello.node * each, (hello.node + 1) * each)
            return "" if equal else f"{words}, and each of {self.total} hosts has {each}"
        if ranks.start < self.own or ranks.stop > self.world:
            return f"{words}, and the other hosts have ranks {self.own} to {self.world - 1}"
        taken = [other.name for key, other in here.items() if key != ranks.start and {*ranks} & {*self.ranks_of(other)}]
        return f"{words}, some of which {taken[0]} has" if taken else ""

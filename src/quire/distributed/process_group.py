"""Ranks as processes, over torch.distributed: gloo for tensors in host memory, NCCL between GPUs.

The ranks of a host meet through a file of their own: no port is chosen, and two engines never meet. Ranks of several
hosts meet through a store of the process that starts them.
"""

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.contracts.parallel import Parallel, dcp_members, ep_members, mover_members, pp_members, tp_members
from quire.distributed import Group
from quire.distributed.listeners import listening, refuse_connections
from quire.distributed.mesh import RankGroups

# A dead or stopped rank is noticed by the process that started the ranks, which ends the others within seconds. A step
# may take long, so the limit of a collective is longer than any step.
TIMEOUT = timedelta(days=1)
MOST_SENT = 64  # tensors kept for sends: more than steps in flight, so the oldest have been received

# The second names are older.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def open_store(listener: socket.socket) -> dist.Store:
    """Return a store for ranks of several hosts, which connect to it on the address of `listener`. Takes the listener.

    The ranks use the store as long as they run. It trusts everyone who can connect to it.
    """
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_ranks(meeting: str, number: int, parallel: Parallel, device: torch.device, shared: bool = False) -> RankGroups:
    """Join the ranks of an engine and return this rank's groups. Waits until all ranks have joined.

    meeting   path of a rendezvous file that no other engine uses; it is empty, or does not exist yet. Or
              tcp://HOST:PORT of a store (`open_store`) that no other ranks use
    number    this rank's number in the engine, 0 to parallel.size - 1
    shared    other ranks have the same GPU, which NCCL does not allow: tensors go through host memory (tests)
    """
    place: dict[str, Any] = {"init_method": f"file://{meeting}"}
    if meeting.startswith("tcp://"):
        address, _, port = meeting.removeprefix("tcp://").rpartition(":")
        place = {"store": dist.TCPStore(address, int(port), None, False, timeout=TIMEOUT)}
    gpus, others = device.type == "cuda", listening()
    dist.init_process_group(
        "nccl" if gpus and not shared else "gloo",
        **place,
        rank=number,
        world_size=parallel.size,
        timeout=TIMEOUT,
        device_id=device if gpus and not shared else None,
    )
    make, pipelines = partial(_make, number=number, hosted=gpus and shared), list(pp_members(parallel))
    tp = make(list(tp_members(parallel)))
    dcp = make(list(dcp_members(parallel))) if parallel.dcp < parallel.tp else None
    if tp is not None and parallel.dcp == parallel.tp:  # the same ranks, with one communicator
        dcp = type(tp)(tp.group, tp.rank, tp.ranks)
    groups = RankGroups(
        tp=tp,
        dcp=dcp,
        pp=make(pipelines),
        tokens=make(pipelines),
        ep=make(list(ep_members(parallel))),
    )
    if gpus and groups.dcp is not None:
        groups.dcp.all_to_all(torch.zeros(groups.dcp.size, device=device))  # NCCL connects now, not in a CUDA graph
    if gpus and not shared:
        others = listening()  # also NCCL's, which connects when it needs to
    groups = replace(groups, movers=_make(list(mover_members(parallel)), number, hosted=gpus))
    refuse_connections(listening() - others)  # gloo's: every rank has all of its connections by now
    return groups


def _make(members: Sequence[Sequence[int]], number: int, hosted: bool) -> "ProcessGroup | None":
    """Make groups of ranks, and return the one with rank `number`; None if it would be alone.

    members   ranks of each group. Every rank of the engine calls this with the same groups, in the same order
    hosted    True: tensors of GPUs go through host memory. Beside the steps of an engine they must: NCCL's kernels of
              two streams could wait for each other
    """
    backend, kind = ("gloo", HostGroup) if hosted else (None, ProcessGroup)
    own: ProcessGroup | None = None
    for ranks in members:
        if len(ranks) > 1:
            made = dist.new_group(list(ranks), timeout=TIMEOUT, backend=backend)
            if number in ranks:
                own = kind(made, list(ranks).index(number), tuple(ranks))
    return own


class ProcessGroup(Group):
    """Ranks as processes, over a process group of torch.distributed.

    group   that process group
    rank    number of this rank in the group
    ranks   global ranks of the members, in order
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...]) -> None:
        self.group, self.rank, self.ranks, self.size = group, rank, ranks, len(ranks)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # under way: gloo reads the tensor until its end
        self.kind, self.name = str(dist.get_backend(group)), str(group.group_name)

    def begin_step(self) -> None:
        """Do nothing: no exchange needs it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def add(self, part: Tensor, residual: Tensor) -> Tensor:
        return residual + self.all_reduce(part)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        _all_gather(out.view(-1), x.view(-1), group=self.group)
        return out

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, which are padded to the largest count on their way."""
        most = max(counts)
        if not most:
            return x
        parts = self.all_gather(_padded(x, most))
        if min(counts) == most:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def scatter_sum(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over ranks. Rows are padded as in `gather_rows`."""
        most = max(counts)
        if not most:
            return x
        if min(counts) < most:
            x = torch.cat([_padded(part, most) for part in x.split(list(counts))])
        x = x.contiguous()
        out = torch.empty((most, *x.shape[1:]), dtype=x.dtype, device=x.device)
        _reduce_scatter(out, x, group=self.group)
        return out[: counts[self.rank]]

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(_bytes(out), _bytes(x), group=self.group)
        return out

    def send(self, x: Tensor, to: int) -> None:
        if x.is_cuda:  # in the order of the stream, so that a CUDA graph can hold it
            dist.send(x.contiguous(), self.ranks[to], group=self.group)
        else:
            self._send_beside(x, to)

    def post(self, x: Tensor, to: int) -> None:
        self._send_beside(x, to)

    def _send_beside(self, x: Tensor, to: int) -> None:
        x = x.clone(memory_format=torch.contiguous_format)
        work = dist.isend(x, self.ranks[to], group=self.group)
        assert work is not None, "this rank is in the group"
        self._sent.append((work, x))
        if len(self._sent) > MOST_SENT:  # received long ago; gloo's work is not complete before someone waits for it
            self._sent.popleft()[0].wait()

    def receive(self, out: Tensor, source: int) -> Tensor:
        dist.recv(out, self.ranks[source], group=self.group)
        return out

    def barrier(self) -> None:
        dist.barrier(group=self.group)
        while self._sent:
            self._sent.popleft()[0].wait()


class HostGroup(ProcessGroup):
    """A `ProcessGroup` over gloo for tensors of GPUs, which travel through host memory. The host waits for each call.

    A copy to or from the host runs on the current stream. No CUDA graph can hold these calls.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(group, rank, ranks)
        self.kind = f"{self.kind} through host memory"

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(_on_host(x)).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(_on_host(x)).to(x.device)

    def scatter_sum(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return super().scatter_sum(_on_host(x), counts).to(x.device)

    def all_to_all(self, x: Tensor) -> Tensor:
        return super().all_to_all(_on_host(x)).to(x.device)

    def send(self, x: Tensor, to: int) -> None:
        self._send_beside(_bytes(_on_host(x)), to)

    def post(self, x: Tensor, to: int) -> None:
        self.send(x, to)

    def receive(self, out: Tensor, source: int) -> Tensor:
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=out.is_cuda)
        super().receive(_bytes(host), source)
        return out.copy_(host)


def _on_host(x: Tensor) -> Tensor:
    """Return a copy of x in host memory. It is pinned: other threads can launch kernels during the copy."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)


def _bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, since gloo does not know every dtype."""
    return x.view(-1).view(torch.uint8)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return x with zeros below, up to `rows` rows."""
    if len(x) == rows:
        return x
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: len(x)] = x
    return out

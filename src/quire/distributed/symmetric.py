"""A group of GPUs of one host that sums through symmetric memory: each rank reads the other ranks' parts itself.

NCCL does everything else, and sums of messages that exceed the buffers. NVLink multicast is never used.
"""

from collections.abc import Callable

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from quire.contracts.errors import ConfigError
from quire.distributed import Group
from quire.distributed.process_group import ProcessGroup
from quire.kernels.comm import BUFFERS, Peers
from quire.kernels.comm.exchange import PROGRAMS, Layout, Slots
from quire.kernels.comm.triton import sum_ranks

BLOCKS = 64  # programs of a sum: enough to fill NVLink, few enough to run at the same time on any GPU


class SymmetricGroup(ProcessGroup):
    """A group of GPUs that sums through symmetric memory. NCCL does the rest, and sums larger messages.

    memory   [BUFFERS x room] uint8, made by `symmetric_memory.empty`; messages of up to `room` bytes are summed in it
    """

    def __init__(self, group: ProcessGroup, memory: Tensor) -> None:
        super().__init__(group.group, group.rank, group.ranks)
        self.kind, self._memory = f"symmetric memory, else {group.kind}", memory
        handle = symmetric_memory.rendezvous(memory, group.name)
        signals = handle.signal_pad_size // 4 // self.size
        self._peers = Peers(
            torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=memory.device),
            torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=memory.device),
            self.rank,
            len(memory) // BUFFERS,
            min(BLOCKS, signals),
        )
        self._calls = 0  # sums of the step that is being launched

    def begin_step(self) -> None:
        self._calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sum(x, None) if self._fits(x) else super().all_reduce(x)

    def add(self, part: Tensor, residual: Tensor) -> Tensor:
        return self._sum(part, residual) if self._fits(part) else super().add(part, residual)

    def _fits(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= self._peers.room

    def _sum(self, part: Tensor, residual: Tensor | None) -> Tensor:
        residual = None if residual is None else residual.contiguous()
        return sum_ranks(part.contiguous(), residual, self._peers, self.next_buffer())

    def next_buffer(self) -> int:
        """Return the buffer index of the next sum. The first sum of a step has its own, the others alternate."""
        buffer = BUFFERS - 1 if self._calls == 0 else self._calls % 2
        self._calls += 1
        return buffer


def with_symmetric_memory(group: Group | None, device: torch.device, room: int) -> tuple[Group | None, str]:
    """Return (group that sums through symmetric memory, ""), or (`group`, reason why it cannot).

    room   bytes of the largest message that is summed through symmetric memory
    All ranks try together and get the same answer.
    """
    if not isinstance(group, ProcessGroup) or device.type != "cuda":
        return group, "" if group is None else "symmetric memory is for GPUs"
    made: list[Group] = []

    def failed(attempt: Callable[[], None]) -> str:
        """Run `attempt` on every rank. Return why it failed here or on another rank; "" when it failed on none."""
        why = ""
        try:
            attempt()
        except RuntimeError as error:  # no peer access, no such memory in this container, no room
            why = str(error).partition("\n")[0] or type(error).__name__
        count = torch.tensor([bool(why)], dtype=torch.int32, device=device)
        return why or "another rank has no symmetric memory" * bool(int(group.all_reduce(count)))

    memory: list[Tensor] = []
    why = failed(lambda: memory.append(symmetric_memory.empty(BUFFERS * room, dtype=torch.uint8, device=device)))
    why = why or failed(lambda: made.append(SymmetricGroup(group, memory[0])))
    return (group, why) if why else (made[0], "")


def exchange_memory(group: Group | None, device: torch.device, layout: Layout, each: int) -> Slots:
    """Return this rank's end of the exchange of rows between replicas. Every rank of the group calls this.

    each   ranks of a replica
    Raises ConfigError where GPUs cannot read each other's memory, or have no room.
    """
    assert isinstance(group, ProcessGroup)
    try:
        memory = symmetric_memory.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(memory, group.name)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{layout.num_bytes / 2**20:.0f} MiB for the exchange between replicas do not fit into this "
            "GPU's free memory: lower --max-num-batched-tokens."
        ) from error
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"these GPUs cannot read each other's memory ({why}), so no tokens reach the experts of "
            "other replicas: leave out -dp or --enable-expert-parallel."
        ) from error
    signals, processors = handle.signal_pad_size // 4 // group.size, torch.cuda.get_device_properties(device)
    peers = Peers(
        torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=device),
        group.rank,
        layout.num_bytes,
        min(PROGRAMS, signals, processors.multi_processor_count),  # all run at once
    )
    return Slots(peers, layout, memory, each)

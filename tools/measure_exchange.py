"""Measures the experts' exchange over symmetric memory between the GPUs of a host, in a CUDA graph, after a check.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONPATH=src \
        torchrun --nproc-per-node 2 tools/measure_exchange.py [--hidden 2048] [--bounds 64,4096] [--wires plain,fp8]

Every rank brings `bound` rows with 8 of 128 experts each, chosen evenly. The check compares the rows that arrive, and
results that stand for those of experts, with the reference. Then a line for each wire and bound: microseconds of
dispatch, of combine and of both, and GB/s: the bytes of rows and results that cross the link into this GPU, over the
time of both. To reach: at most 12 us for 64 rows of 2,048, at least 300 GB/s for 4,096 rows. Dispatch alone writes the
same rows again while others read them, which changes no byte.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.distributed.process_group import ProcessGroup
from quire.distributed.symmetric import exchange_memory
from quire.kernels.comm.exchange import Layout, Slots
from quire.kernels.comm.exchange_ref import Replica, combined, dispatched
from quire.kernels.comm.triton_exchange import combine, dispatch
from quire.kernels.quantize.rows import QuantizedRows

EXPERTS, TOP_K, LAYERS, REPLAYS = 128, 8, 20, 10
WIRES = {"plain": AS_THEY_ARE, "fp8": Wire("e4m3", 128), "fp8-row": Wire("e4m3"), "int8": Wire("int8")}


def brought(rank: int, rows: int, hidden: int) -> Replica:
    """The rows of a rank, the same numbers in every process."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.rand(rows, EXPERTS, generator=draw).topk(TOP_K).indices.int()
    return Replica(torch.randn(rows, hidden, generator=draw).bfloat16(), ids, torch.rand(rows, TOP_K, generator=draw),
                   rows)  # fmt: skip


def results(x: Tensor | QuantizedRows, rank: int) -> Tensor:
    """Results that stand for those of the experts of `rank`."""
    return (x.float() * (rank + 1)).to(x.dtype)


@dataclass(frozen=True)
class Exchange:
    """The exchange of a rank that brings `bound` rows.

    slots, owner   see `quire.kernels.comm.triton_exchange`;  own  the rows, on the CPU
    """

    slots: Slots
    owner: Tensor
    own: Replica
    bound: int

    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x, ids, weights and the number of rows on the device of the slots."""
        device, own = self.slots.memory.device, self.own
        count = torch.tensor([own.count], dtype=torch.int32, device=device)
        return own.x.to(device), own.ids.to(device), own.weights.to(device), count

    def parts(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return functions that launch dispatch and combine; results lie in symmetric memory, as experts leave them."""
        x, ids, weights, count = self.given()
        residual, y = torch.zeros_like(x), self.slots.y(self.bound, x.dtype)
        return (lambda: dispatch(x, ids, weights, count, self.owner, self.slots, self.bound),
                lambda: combine(residual, y, ids, count, self.owner, self.slots, self.bound))  # fmt: skip

    def check(self) -> None:
        """Run once, and assert that rows and results are those of the reference."""
        rank, ranks, wire = self.slots.peers.rank, self.slots.layout.ranks, self.slots.layout.wire
        everyone = [brought(one, self.bound, self.own.x.shape[1]) for one in range(ranks)]
        owner = self.owner.cpu()
        sent = [dispatched(everyone, owner, one, self.bound, wire=wire) for one in range(ranks)]
        x, ids, weights, count = self.given()
        got, got_weights, got_ids, _ = dispatch(x, ids, weights, count, self.owner, self.slots, self.bound)
        want, want_weights, want_ids = sent[rank]
        here = (want_ids >= 0).any(1)
        assert torch.equal(got_ids.cpu(), want_ids) and torch.equal(got_weights.cpu(), want_weights), "ids or weights"
        assert torch.equal(got.float().cpu()[here], want.float()[here]), f"rows {wire}"
        y = results(got, rank).to(x.dtype)
        found = combine(torch.ones_like(x), y, ids, count, self.owner, self.slots, self.bound)
        every = [results(one[0], number) for number, one in enumerate(sent)]
        expected = combined(torch.ones_like(self.own.x), everyone, every, owner, rank, self.bound)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)

    def crossing(self) -> int:
        """Return the bytes of rows and results that come to this GPU from others in an exchange, if ranks are alike."""
        layout, owners = self.slots.layout, self.owner.cpu()[self.own.ids.long()]
        rows = sum(int((owners == one).any(1).sum()) for one in range(layout.ranks) if one != self.slots.peers.rank)
        there, back = layout.wire.row_bytes(layout.hidden, layout.item_bytes), layout.hidden * layout.item_bytes
        return rows * (there + back)


def settle() -> None:
    """Wait for all ranks."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds of a call in a graph of LAYERS calls, the best of REPLAYS."""
    settle()
    call()
    settle()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(LAYERS):
            call()
    for _ in range(REPLAYS):
        settle()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks begin together after it
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / LAYERS)
    settle()
    return best


def main() -> None:
    """Check and measure every wire and bound that the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--bounds", default="1,64,256,1024,4096")
    parser.add_argument("--wires", default="plain,fp8,int8")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.group.WORLD
    assert world is not None
    group = ProcessGroup(world, dist.get_rank(), tuple(range(dist.get_world_size())))
    owner = (torch.arange(EXPERTS, device=device) * group.size // EXPERTS).int()
    bounds = [int(one) for one in options.bounds.split(",")]
    for name in options.wires.split(","):
        layout = Layout(ranks=group.size, rows=max(bounds), hidden=options.hidden, top_k=TOP_K, item_bytes=2,
                        wire=WIRES[name])  # fmt: skip
        slots = exchange_memory(group, device, layout, 1)
        for bound in bounds:
            made = Exchange(slots, owner, brought(group.rank, bound, options.hidden), bound)
            if bound <= 256:  # the reference goes row by row
                settle()
                made.check()
            first, second = made.parts()
            alone, back, both = timed(first), timed(second), timed(lambda: (first(), second()))  # noqa: B023
            if group.rank == 0:
                speed = made.crossing() / both / 1e3
                print(f"{name:8s} {bound:5d} rows: dispatch {alone:7.1f}, combine {back:7.1f}, both {both:7.1f} us, "
                      f"{speed:6.1f} GB/s", flush=True)  # fmt: skip
        settle()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measures sums and the experts' exchange between ranks by size, each algorithm alone; `measure_ranks.py` starts it.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONPATH=src \
        torchrun --nproc-per-node 4 tools/measure_exchange.py [--what sums,rows] [--hidden 2048] [--out FILE]

sums   microseconds of an all-reduce of bfloat16: NCCL (gloo on CPUs); Quire's `sum_ranks` as it is set, and with the
       best number of programs and cut; PyTorch's one-shot and two-shot over symmetric memory
rows   microseconds of dispatch, of combine and of both. Every rank brings `rows` rows with 8 of 128 experts each,
       chosen evenly. "pull" in each form of rows, after a check against the reference; "all-gather" as replicas
       without CUDA graphs use it. GB/s: bytes that cross the link into this GPU, over the time of both

GPUs are timed in a CUDA graph of 20 calls, but all-gather, which no graph can hold. Rank 0 prints and appends a JSON
line for each size. To reach with pull: at most 12 us for 64 rows of 2,048, at least 300 GB/s for 4,096 rows. Dispatch
alone writes the same rows again while others read them, which changes no byte. On CPUs only gloo's algorithms run.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.distributed.process_group import BACKENDS, ProcessGroup
from quire.kernels.comm.exchange import Layout, Slots
from quire.kernels.comm.exchange_ref import Replica, combined, dispatched
from quire.kernels.quantize.rows import QuantizedRows
from quire.layers.expert_dispatch import AllGatherExchange

EXPERTS, TOP_K, CALLS, REPLAYS = 128, 8, 20, 10
WIRES = {"plain": AS_THEY_ARE, "fp8": Wire("e4m3", 128), "fp8-row": Wire("e4m3"), "int8": Wire("int8")}
PROGRAMS = (8, 16, 32, 64, 128)
FINE = {"fine": 1 << 40, "coarse": 0}  # elements up to which a message is cut finely
GRAPHED = 1 << 26  # bytes of the largest message that is summed through symmetric memory here


def brought(rank: int, rows: int, hidden: int) -> Replica:
    """The rows of a rank, the same numbers in every process."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.rand(rows, EXPERTS, generator=draw).topk(TOP_K).indices.int()
    return Replica(
        torch.randn(rows, hidden, generator=draw).bfloat16(), ids, torch.rand(rows, TOP_K, generator=draw), rows
    )


def results(x: Tensor | QuantizedRows, rank: int) -> Tensor:
    """Results that stand for those of the experts of `rank`."""
    return (x.float() * (rank + 1)).to(x.dtype)


@dataclass(frozen=True)
class Exchange:
    """The exchange by pull of a rank that brings `bound` rows.

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
        from quire.kernels.comm.triton_exchange import combine, dispatch

        x, ids, weights, count = self.given()
        residual, y = torch.zeros_like(x), self.slots.y(self.bound, x.dtype)
        return (
            lambda: dispatch(x, ids, weights, count, self.owner, self.slots, self.bound),
            lambda: combine(residual, y, ids, count, self.owner, self.slots, self.bound),
        )

    def check(self) -> None:
        """Run once, and assert that rows and results are those of the reference."""
        from quire.kernels.comm.triton_exchange import combine, dispatch

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
    for _ in range(2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()


def timed(call: Callable[[], object], begin: Callable[[], None] = lambda: None) -> float:
    """Return the microseconds of a call in a graph of CALLS calls, the best of REPLAYS. `begin` comes first in it."""
    settle()
    begin()
    call()
    settle()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        begin()
        for _ in range(CALLS):
            call()
    for _ in range(REPLAYS):
        settle()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks begin together after it
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / CALLS)
    settle()
    return round(best, 2)


def timed_eagerly(call: Callable[[], object]) -> float:
    """Return the microseconds of a call without a graph, the best of REPLAYS."""
    best = float("inf")
    for _ in range(REPLAYS + 1):
        settle()
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return round(best * 1e6, 2)


def sums(group: ProcessGroup, device: torch.device, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the times of an all-reduce of each size in bytes."""
    if device.type == "cpu":
        for size in sizes:
            x = torch.zeros(size // 2, dtype=torch.bfloat16)
            yield {"bytes": size, "gloo": timed_eagerly(lambda x=x: group.all_reduce(x))}
        return
    import torch.distributed._symmetric_memory as memory

    import quire.kernels.comm.triton as kernel
    from quire.distributed.symmetric import SymmetricGroup
    from quire.kernels.comm import BUFFERS

    room = min(max(sizes), GRAPHED)
    buffers = memory.empty(BUFFERS * room, dtype=torch.uint8, device=device)
    ours = SymmetricGroup(group, buffers)
    known, limit = ours._peers, memory.rendezvous(buffers, group.name).signal_pad_size // 4 // group.size
    for size in sizes:
        x, residual = (torch.randn(size // 2, device=device).bfloat16() for _ in range(2))
        row: dict[str, Any] = {"bytes": size, "nccl": timed(lambda x=x: dist.all_reduce(x, group=group.group))}
        if size <= room:

            def add(x: Tensor = x, residual: Tensor = residual) -> Tensor:
                return ours.add(x, residual)

            row["quire"], tried = timed(add, ours.begin_step), {}
            for blocks in (one for one in PROGRAMS if one <= limit):
                ours._peers = dataclasses.replace(known, blocks=blocks)
                for cut, few in FINE.items():
                    if size <= 1 << 20 or cut == "coarse":
                        with mock.patch.object(kernel, "FEW", few):
                            tried[f"{blocks} programs, {cut}"] = timed(add, ours.begin_step)
            ours._peers = known
            best = min(tried, key=lambda name: tried[name])
            row |= {"best": tried[best], "best_setting": best}
        shared = memory.empty(size // 2, dtype=torch.bfloat16, device=device)
        memory.rendezvous(shared, group.name)
        for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            operation = getattr(torch.ops.symm_mem, name)
            row[name.rstrip("_")] = timed(lambda call=operation, x=shared: call(x, "sum", group.name))
        yield row
    check_sums(ours, group, device)


def check_sums(ours: Any, group: ProcessGroup, device: torch.device) -> None:
    """Assert that a sum through symmetric memory is that of float32."""
    x, residual = torch.randn(1 << 20, device=device).bfloat16(), torch.ones(1 << 20, device=device).bfloat16()
    expected = (residual.float() + group.all_reduce(x.float())).bfloat16()
    ours.begin_step()
    torch.testing.assert_close(ours.add(x.clone(), residual.clone()), expected, rtol=1e-2, atol=1e-2)


def rows(
    group: ProcessGroup, device: torch.device, hidden: int, bounds: Sequence[int], wires: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the times of the experts' exchange for each form of rows and each number of rows."""
    for bound in bounds:
        yield {"rows": bound, "hidden": hidden, "wire": "plain", "way": "all-gather"} | gathered(
            group, brought(group.rank, bound, hidden), device
        )
    if device.type == "cpu":
        return
    from quire.distributed.symmetric import exchange_memory

    owner = (torch.arange(EXPERTS, device=device) * group.size // EXPERTS).int()
    for name in wires:
        layout = Layout(ranks=group.size, rows=max(bounds), hidden=hidden, top_k=TOP_K, item_bytes=2, wire=WIRES[name])
        slots = exchange_memory(group, device, layout, 1)
        for bound in bounds:
            made = Exchange(slots, owner, brought(group.rank, bound, hidden), bound)
            if bound <= 256:  # the reference goes row by row
                settle()
                made.check()
            first, second = made.parts()
            there, back, both = timed(first), timed(second), timed(lambda: (first(), second()))  # noqa: B023
            yield {
                "rows": bound,
                "hidden": hidden,
                "wire": name,
                "way": "pull",
                "dispatch": there,
                "combine": back,
                "both": both,
                "GB/s": round(made.crossing() / both / 1e3, 1),
            }
        settle()


def gathered(group: ProcessGroup, own: Replica, device: torch.device) -> dict[str, float]:
    """Return the times of dispatch, of combine and of both by all-gather and reduce-scatter."""
    exchange, counts = AllGatherExchange(group, None), [own.count] * group.size
    routed = own.x.to(device), own.weights.to(device), own.ids.to(device)
    y = torch.zeros(own.count * group.size, own.x.shape[1], dtype=own.x.dtype, device=device)
    ways = {
        "dispatch": lambda: exchange.dispatch(routed, counts),
        "combine": lambda: exchange.combine(y, counts),
        "both": lambda: (exchange.dispatch(routed, counts), exchange.combine(y, counts)),
    }
    return {name: timed_eagerly(call) for name, call in ways.items()}


def main() -> None:
    """Measure what the options name; rank 0 prints and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="sums,rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--sizes", default=",".join(str(4096 << n) for n in range(15)), help="bytes of a sum")
    parser.add_argument("--bounds", default="1,64,256,1024,4096", help="rows that a rank brings")
    parser.add_argument("--wires", default="plain,fp8,int8")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = (
        torch.device(options.device, int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device.type], device_id=device if device.type == "cuda" else None)
    world = dist.group.WORLD
    assert world is not None
    group = ProcessGroup(world, dist.get_rank(), tuple(range(dist.get_world_size())))
    sizes, bounds = ([int(one) for one in text.split(",")] for text in (options.sizes, options.bounds))
    ways = {
        "sums": lambda: sums(group, device, sizes),
        "rows": lambda: rows(group, device, options.hidden, bounds, options.wires.split(",")),
    }
    with torch.inference_mode():
        for what in options.what.split(","):
            for row in ways[what]():
                line = json.dumps({"part": what, "ranks": group.size} | row)
                if group.rank == 0:
                    print(line, flush=True)
                if group.rank == 0 and options.out:
                    with options.out.open("a") as file:
                        file.write(line + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

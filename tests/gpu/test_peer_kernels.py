"""The kernels that read other GPUs' memory, by processes that share one GPU: sums over ranks, dispatch and combine.

Each rank maps the memory of the others by CUDA IPC. The driver runs the processes in turn, for some milliseconds each,
so a kernel that waits for another rank takes long, and ends. `python -m tests.gpu.test_peer_kernels RANK RANKS FOLDER`
is a rank. It computes the parts of all ranks, so that it can check its own.
"""

import ctypes
import faulthandler
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.kernels.comm import BUFFERS, Peers
from quire.kernels.comm.exchange import Layout, Slots
from quire.kernels.comm.exchange_ref import Replica, combined, dispatched
from quire.kernels.quantize.rows import QuantizedRows

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
HANG, START = 240, 240  # seconds: of the kernels of all steps; of the start of all ranks and their compilations
NO_IPC = 77  # exit code of a rank where processes cannot map each other's memory
PAGE = 2 << 20  # smaller allocations may share a page of the driver
SIGNALS, ROOM = 1 << 16, 1 << 19  # bytes
EXPERTS, ROWS, TOP_K = 7, 96, 3
WIRES = (AS_THEY_ARE, Wire("e4m3", 128), Wire("int8"))
STEPS = ((8, (8, 3, 0, 5)), (8, (0, 5, 8, 8)), (8, (0, 0, 0, 0)), (96, (96, 70, 1, 96)))  # bound, rows of each rank


class Handle(ctypes.Structure):
    """The driver's CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Mapped:
    """Memory of the GPU as PyTorch takes it (`__cuda_array_interface__`)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def checked(code: int, words: str, end: int = 1) -> None:
    """End the rank with the exit code `end` where the driver answers with an error."""
    if code:
        print(f"{words}: CUDA error {code}", flush=True)
        sys.exit(end)


def mapped(rank: int, ranks: int, folder: Path, size: int) -> list[Tensor]:
    """Return the memory of every rank, [size] uint8 zeros each. Waits for the other ranks."""
    torch.zeros(1, device=DEVICE)  # makes the device's context, without which the driver takes no call
    driver = ctypes.CDLL("libcuda.so.1")
    own, handle = ctypes.c_uint64(), Handle()
    checked(driver.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(size)), "cuMemAlloc")
    memory = torch.as_tensor(Mapped(own.value, size), device=DEVICE)
    memory.zero_()
    torch.cuda.synchronize()
    checked(driver.cuIpcGetMemHandle(ctypes.byref(handle), own), "cuIpcGetMemHandle", NO_IPC)
    publish(folder, f"handle{rank}", bytes(handle))
    found = []
    for other in range(ranks):
        address = own
        if other != rank:
            theirs, address = Handle.from_buffer_copy(awaited(folder, f"handle{other}")), ctypes.c_uint64()
            code = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), theirs, ctypes.c_uint(1))
            checked(code, "cuIpcOpenMemHandle", NO_IPC)
        found.append(torch.as_tensor(Mapped(address.value or 0, size), device=DEVICE))
    return found


def publish(folder: Path, name: str, data: bytes) -> None:
    """Write a file that other ranks see only when it is whole."""
    (folder / f"{name}.part").write_bytes(data)
    (folder / f"{name}.part").rename(folder / name)


def awaited(folder: Path, name: str) -> bytes:
    """Return the contents of a file that another rank publishes."""
    end = time.monotonic() + START
    while not (folder / name).exists():
        assert time.monotonic() < end, f"no {name} after {START} s"
        time.sleep(0.01)
    return (folder / name).read_bytes()


def parts(ranks: int, count: int, dtype: torch.dtype, seed: int) -> tuple[list[Tensor], Tensor]:
    """Return the parts of all ranks, and a residual, on the host."""
    random = torch.Generator().manual_seed(seed)
    *found, residual = (torch.randn(count, generator=random).to(dtype) for _ in range(ranks + 1))
    return found, residual


def check_sums(rank: int, ranks: int, peers: Peers) -> None:
    """Sums of all sizes, one behind the other; then in a CUDA graph that is replayed with other numbers."""
    from quire.kernels.comm.triton import sum_ranks

    launched, turn = [], 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1, 1000, 4096, 1 << 16, 70_001):
            for add in (True, False):
                every, residual = parts(ranks, count, dtype, turn)
                total: Any = sum(part.float() for part in every) + (residual.float() if add else 0)
                given = residual.to(DEVICE) if add else None
                buffer = BUFFERS - 1 if turn == 0 else turn % 2
                launched.append((sum_ranks(every[rank].to(DEVICE), given, peers, buffer), total.to(dtype)))
                turn += 1
    for found, right in launched:
        last = 0 if right.dtype == torch.float32 else torch.finfo(right.dtype).eps  # digit: one rounding
        torch.testing.assert_close(found.cpu(), right, rtol=last, atol=0, msg=lambda words: f"a sum: {words}")
    if DEVICE.type == "cuda":
        check_graph(rank, ranks, peers)


def check_graph(rank: int, ranks: int, peers: Peers) -> None:
    """Three sums in a CUDA graph, each of the one before, in a step of their own as an engine has them."""
    from quire.kernels.comm.triton import sum_ranks

    part, residual, out = (torch.zeros(4096, device=DEVICE) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = sum_ranks(part.clone(), residual.clone(), peers, BUFFERS - 1)
        for buffer in (1, 0):
            total = sum_ranks(total.clone(), None, peers, buffer)
        out.copy_(total)
    for seed in range(5):
        every, rest = parts(ranks, 4096, torch.float32, 100 + seed)
        part.copy_(every[rank])
        residual.copy_(rest)
        graph.replay()
        right: Any = sum(every) + rest
        for _ in range(2):
            right = sum([right] * (ranks - 1), right)
        assert torch.equal(out.cpu(), right), f"replay {seed}"


def replica(number: int, seed: int, count: int, layout: Layout) -> Replica:
    """Return the rows of a replica in a step. An expert may come twice, or be -1. On 8-bit wires x is exact."""
    random = torch.Generator().manual_seed(1000 * seed + number)
    x = torch.randn(ROWS, layout.hidden, generator=random)
    if layout.wire.values == "e4m3":
        x = x.mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        x[:, :: layout.wire.group] = 448
    elif layout.wire.values:
        x = x.mul(40).round().clamp(-127, 127)
        x[:, 0] = 127
    ids = torch.randint(-1, EXPERTS, (ROWS, TOP_K), generator=random, dtype=torch.int32)
    return Replica(x, ids, torch.rand(ROWS, TOP_K, generator=random), count)


def numbers(x: Tensor | QuantizedRows) -> Tensor:
    """Return the numbers that rows mean, on the host."""
    return (x.float() if isinstance(x, QuantizedRows) else x).float().cpu()


def check_exchange(rank: int, ranks: int, slots: Slots) -> None:
    """Rows reach the ranks of their experts, and results come back, in steps of changing counts."""
    from quire.kernels.comm.triton_exchange import combine, dispatch

    for seed, (bound, counts) in enumerate(STEPS * 2):
        everyone = [replica(number, seed, counts[number], slots.layout) for number in range(ranks)]
        own, random = everyone[rank], torch.Generator().manual_seed(seed)
        owner = torch.randint(0, ranks, (EXPERTS,), generator=random, dtype=torch.int32)
        residual = torch.randn(ROWS, slots.layout.hidden, generator=random)
        sent = [dispatched(everyone, owner, other, bound, wire=slots.layout.wire) for other in range(ranks)]
        results = [numbers(x) * (other + 1) for other, (x, _, _) in enumerate(sent)]
        count = torch.tensor([own.count], dtype=torch.int32, device=DEVICE)
        given = own.ids.to(DEVICE), count, owner.to(DEVICE), slots, bound
        x, weights, ids, y = dispatch(own.x.to(DEVICE), given[0], own.weights.to(DEVICE), *given[1:])
        here = (sent[rank][2] >= 0).any(1)
        assert torch.equal(ids.cpu(), sent[rank][2]), f"ids of step {seed}"
        assert torch.equal(weights.cpu(), sent[rank][1]), f"weights of step {seed}"
        assert torch.equal(numbers(x)[here], numbers(sent[rank][0])[here]), f"rows of step {seed}"
        assert not y.cpu()[here].any(), f"step {seed}: results begin at zero"
        found = results[rank].to(DEVICE)  # a kernel may write to symmetric memory itself, or give other memory
        found = y.copy_(found) if seed % 2 else found
        got = combine(residual.clone().to(DEVICE), found, *given).cpu()
        torch.testing.assert_close(got, combined(residual, everyone, results, owner, rank, bound), rtol=1e-6, atol=1e-5)


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    """Map the memory of all ranks, and run every kernel."""
    layouts = [Layout(ranks=ranks, rows=ROWS, hidden=256, top_k=TOP_K, item_bytes=4, wire=wire) for wire in WIRES]
    sizes = [SIGNALS, BUFFERS * ROOM, *(layout.num_bytes for layout in layouts)]
    places = [sum(sizes[:number]) for number in range(len(sizes))]
    memory = mapped(rank, ranks, folder, -(-sum(sizes) // PAGE) * PAGE)

    def peers(place: int, room: int) -> Peers:
        """Return the addresses of a part of all ranks' memory."""
        buffers, signals = (
            torch.tensor([one.data_ptr() + at for one in memory], dtype=torch.int64, device=DEVICE) for at in (place, 0)
        )
        return Peers(buffers, signals, rank, room, 16)

    publish(folder, f"mapped{rank}", b"")
    for other in range(ranks):
        awaited(folder, f"mapped{other}")
    faulthandler.dump_traceback_later(HANG, exit=True)
    check_sums(rank, ranks, peers(places[1], ROOM))
    print("sums agree", flush=True)
    for layout, place in zip(layouts, places[2:], strict=True):
        own = memory[rank][place : place + layout.num_bytes]
        check_exchange(rank, ranks, Slots(peers(place, layout.num_bytes), layout, own))
        print(f"rows agree: wire {layout.wire.values or 'as they are'}", flush=True)
    assert not memory[rank][:SIGNALS].any(), "signals are 0 after"
    publish(folder, f"done{rank}", b"")
    for other in range(ranks):  # they may still read this rank's memory
        awaited(folder, f"done{other}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(tmp_path: Path, ranks: int) -> None:
    files = [tmp_path / f"said{rank}" for rank in range(ranks)]
    running = []
    for rank, file in enumerate(files):
        command = [sys.executable, "-m", "tests.gpu.test_peer_kernels", str(rank), str(ranks), str(tmp_path)]
        with file.open("w") as said:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said))
    end = time.monotonic() + START + HANG
    while any(one.poll() is None for one in running) and not any(one.poll() for one in running):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    ended = [one.poll() for one in running]  # None: killed below, since another one failed or the time is over
    for one in running:
        one.kill()
        one.wait()
    words = "\n".join(
        f"rank {rank}, exit code {code}:\n{file.read_text()}"
        for rank, (code, file) in enumerate(zip(ended, files, strict=True))
    )
    if NO_IPC in ended:
        pytest.skip(f"processes cannot map each other's memory of this GPU: {words}")
    assert ended == [0] * ranks, words


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

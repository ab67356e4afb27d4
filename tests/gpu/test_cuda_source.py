"""Kernels in CUDA C++ on a GPU: launched plainly, behind a kernel of Triton, in clusters, and from a graph."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import nvrtc, pdl
from quire.kernels.compile_cache import compiling_ahead
from quire.kernels.cuda_source import CudaKernel, CudaSource, missing, pointers
from quire.kernels.nvrtc import CompileError
from quire.kernels.triton_runtime import jit, tl

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TEXT = """
#include <cuda_bf16.h>

extern "C" __global__ void add(const float *x, const __nv_bfloat16 *y, float *out, float factor, int n) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) out[at] = x[at] + PLUS + factor * __bfloat162float(y[at]);
}

// The ranks of blocks in their clusters, through the last word of the shared memory of the next block in the cluster.
extern "C" __global__ void ranks(unsigned *out, int words) {
    extern __shared__ unsigned held[];
    unsigned rank, size, other;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) held[words - 1] = rank;
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    unsigned at = (unsigned)__cvta_generic_to_shared(held + words - 1);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"((rank + 1) % size));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(other) : "r"(at) : "memory");
    if (threadIdx.x == 0) {
        out[2 * blockIdx.x] = rank;
        out[2 * blockIdx.x + 1] = other;
    }
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}
"""
NUM, BLOCK = 100_000, 256
GRID = (-(-NUM // BLOCK),)


@jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = factor * x, n numbers."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def source(tmp_path: Path) -> CudaSource:
    path = tmp_path / "some.cu"
    path.write_text(TEXT)
    return CudaSource(path, {"PLUS": "1.0f"})


@pytest.fixture
def add(source: CudaSource) -> CudaKernel:
    return source.kernel("add")


@pytest.fixture
def tensors(device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, y, and room for the result."""
    x, out = torch.randn(NUM, device=device), torch.full((NUM,), float("nan"), device=device)
    yield x, torch.randn(NUM, device=device).bfloat16(), out


def values(x: Tensor, y: Tensor, out: Tensor) -> list[object]:
    """Arguments of `add`."""
    return [*(c_void_p(one.data_ptr()) for one in (x, y, out)), c_float(2.0), c_int(NUM)]


def wanted(x: Tensor, y: Tensor) -> Tensor:
    return x + 1 + 2 * y.float()


def test_a_launch(add: CudaKernel, tensors: tuple[Tensor, Tensor, Tensor], own_cache: Path) -> None:
    x, y, out = tensors
    add.launch(GRID, (BLOCK,), values(*tensors))
    torch.testing.assert_close(out, wanted(x, y))
    assert [path.name.split("-")[0] for path in own_cache.iterdir()] == ["some"]
    print(nvrtc.versions())


def test_a_launch_on_another_stream_by_a_new_thread(add: CudaKernel, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, out = tensors
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    add.launch(GRID, (BLOCK,), values(*tensors), stream=stream.cuda_stream)
    stream.synchronize()
    torch.testing.assert_close(out, wanted(x, y))
    out.zero_()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(add.launch, GRID, (BLOCK,), values(*tensors)).result()
    torch.testing.assert_close(out, wanted(x, y))


def test_launches_behind_kernels_of_triton(add: CudaKernel, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Each waits for the kernel before it, though it starts earlier: many in a row find a wait that is missing."""
    x, y, out = tensors
    scaled, expected = torch.empty_like(x), x.clone()
    for _ in range(50):
        scale_kernel[GRID](x, scaled, NUM, 0.5, BLOCK=BLOCK, PDL=True, **pdl.options(True))
        add.launch(GRID, (BLOCK,), values(scaled, y, x), pdl=True)
        expected = wanted(expected * 0.5, y)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_a_cluster(source: CudaSource, device: torch.device, size: int) -> None:
    out = torch.full((32, 2), -1, dtype=torch.int32, device=device)
    args = [c_void_p(out.data_ptr()), c_int(16)]
    source.kernel("ranks").launch((32,), (64,), args, shared_bytes=64, cluster=(size,))
    rank = torch.arange(32, device=device, dtype=torch.int32) % size
    assert torch.equal(out, torch.stack((rank, (rank + 1) % size), 1))


def test_all_shared_memory_of_a_block(source: CudaSource, device: torch.device) -> None:
    out = torch.full((8, 2), -1, dtype=torch.int32, device=device)
    properties: Any = torch.cuda.get_device_properties(device)
    whole = properties.shared_memory_per_block_optin
    args = [c_void_p(out.data_ptr()), c_int(whole // 4)]
    ranks = source.kernel("ranks")
    ranks.launch((8,), (64,), args, shared_bytes=whole, cluster=(2,))
    assert out.flatten().tolist() == [0, 1, 1, 0] * 4
    with pytest.raises(OSError, match="cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"):
        ranks.launch((8,), (64,), args, shared_bytes=whole + 1)


def test_a_graph(add: CudaKernel, source: CudaSource, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """The last kernel of the graph is loaded in the middle of the capture."""
    x, y, out = tensors
    ranks, prepared = torch.full((16, 2), -1, dtype=torch.int32, device=x.device), pointers(values(*tensors))
    scaled = torch.empty_like(x)
    scale_kernel[GRID](x, scaled, NUM, 0.5, BLOCK=BLOCK, PDL=True, **pdl.options(True))
    add.launch(GRID, (BLOCK,), prepared, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_kernel[GRID](x, scaled, NUM, 0.5, BLOCK=BLOCK, PDL=True, **pdl.options(True))
        add.launch(GRID, (BLOCK,), values(scaled, y, out), pdl=True)
        args = [c_void_p(ranks.data_ptr()), c_int(16)]
        source.kernel("ranks").launch((16,), (64,), args, shared_bytes=64, cluster=(8,))
    assert (ranks == -1).all(), "nothing runs in a capture"
    for factor in (1.0, -3.0):
        x.fill_(factor)
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, wanted(x * 0.5, y))
    assert ranks[:, 0].tolist() == [*range(8)] * 2


def test_compiling_ahead_runs_nothing(
    add: CudaKernel, tensors: tuple[Tensor, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, out = tensors
    (wrong := tmp_path / "wrong.cu").write_text(TEXT)  # without a value for PLUS
    fails = CudaSource(wrong).kernel("add")
    with compiling_ahead() as ahead:
        for _ in range(2):
            add.launch(GRID, (BLOCK,), values(*tensors))
            scale_kernel[GRID](x, out, NUM, 0.5, BLOCK=BLOCK, PDL=False)
            fails.launch(GRID, (BLOCK,), values(*tensors))
    report = ahead.report()
    assert out.isnan().all() and report.num_kernels == 3
    assert report.failed == (("add", 'wrong.cu(7): error: identifier "PLUS" is undefined'),)
    with pytest.raises(CompileError, match="PLUS"):
        fails.launch(GRID, (BLOCK,), values(*tensors))
    monkeypatch.setattr(nvrtc, "compile_text", lambda *_: pytest.fail("compiled at its launch"))
    add.launch(GRID, (BLOCK,), values(*tensors))
    torch.testing.assert_close(out, wanted(x, y))


def test_many_launches(add: CudaKernel, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Their time on the host is printed."""
    x, y, out = tensors
    prepared = pointers(values(*tensors))
    for name, make in (("with new arguments", lambda: values(*tensors)), ("with prepared ones", lambda: prepared)):
        add.launch(GRID, (BLOCK,), make())
        torch.cuda.synchronize()
        began = perf_counter()
        for _ in range(200):
            add.launch(GRID, (BLOCK,), make())
        print(f"a launch {name}: {(perf_counter() - began) / 200 * 1e6:.1f} us")
        torch.testing.assert_close(out, wanted(x, y))

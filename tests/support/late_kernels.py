"""Kernels in CUDA C++ beside which others start early, to see what these read before their wait."""

from ctypes import c_void_p
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.cuda_source import CudaSource

TEXT = """
extern "C" __global__ void late(const uint4 *from, uint4 *to) {
    unsigned long long begin, now;
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < 2000000);
    to[threadIdx.x] = from[threadIdx.x];
}
extern "C" __global__ void between() {
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
}
"""


class LateCopy:
    """A copy on the GPU that takes 2 ms, and a kernel behind it that waits for it. Both let the next kernel start."""

    def __init__(self, folder: Path) -> None:
        (path := folder / "late.cu").write_text(TEXT)
        self._late, self._between = (CudaSource(path).kernel(name) for name in ("late", "between"))

    def launch(self, source: Tensor, target: Tensor) -> None:
        """Copy at most 16 KiB, a multiple of 16 bytes. The GPU has nothing else to do when it begins."""
        torch.cuda.synchronize()
        args = [c_void_p(source.data_ptr()), c_void_p(target.data_ptr())]
        self._late.launch((1,), (target.nbytes // 16,), args, pdl=True)
        self._between.launch((1,), (32,), [], pdl=True)

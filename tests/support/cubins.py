"""The resources of kernels in CUDA C++, as the compiler tells them. Needs no GPU."""

import subprocess
from pathlib import Path

from quire.kernels import nvrtc
from quire.kernels.cuda_source import CudaSource


def resources(source: CudaSource, folder: Path) -> str:
    """Compile a source for Hopper, and return what cuobjdump tells of registers, stack and memory of its kernels."""
    cubin, _ = source.cubin("sm_90a")
    (folder / "made.cubin").write_bytes(cubin)
    headers = nvrtc.headers()
    assert headers is not None
    command = [str(headers.parent / "bin" / "cuobjdump"), "-res-usage", str(folder / "made.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

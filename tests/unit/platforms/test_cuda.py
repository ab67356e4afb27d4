"""Facts about a GPU, as far as they can be had without one."""

import ctypes
import os

import pytest
import torch

from quire.contracts.errors import ConfigError
from quire.platforms.cuda import CudaFacts, NvmlFacts, read_cuda_facts, read_nvml, runs_on


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="^no CUDA device: PyTorch .*; use --device cpu.$"):
        read_cuda_facts()


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80"], True),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((12, 0), ["sm_100", "compute_90"], True),
        ((7, 5), ["sm_80", "compute_80"], False),
        ((9, 0), [], True),
    ],
)
def test_machine_code_and_ptx(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert runs_on(capability, architectures) is runs


class Nvml:
    """NVML with two processes beside this one."""

    def __init__(self, init: int = 0, used: tuple[int, ...] = (5, 7)) -> None:
        self._init, self._used, self.open = init, used, 0

    def nvmlInit_v2(self) -> int:
        self.open += not self._init
        return self._init

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, out: ctypes.Array[ctypes.c_char], size: int) -> int:
        out.value = b"580.159.04"
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, out: object) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object, count: object, found: object) -> int:
        table = ctypes.cast(found, ctypes.POINTER(ctypes.c_ulonglong * 3))  # type: ignore[arg-type]
        for i, (pid, used) in enumerate([(os.getpid(), 100), *((j, u) for j, u in enumerate(self._used))]):
            table[i][0], table[i][1] = pid, used
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 1 + len(self._used)  # type: ignore[arg-type]
        return 0


@pytest.mark.parametrize(
    ("nvml", "uuid", "found"),
    [
        (Nvml(), "GPU-1", NvmlFacts(driver_version="580.159.04", others_memory=12)),
        (Nvml(), "GPU-2", NvmlFacts(driver_version="580.159.04", others_memory=None)),
        (Nvml(used=(5, 2**64 - 1)), "GPU-1", NvmlFacts(driver_version="580.159.04", others_memory=None)),
        (Nvml(init=9), "GPU-1", NvmlFacts()),
    ],
)
def test_what_the_driver_tells_of_other_processes(nvml: Nvml, uuid: str, found: NvmlFacts) -> None:
    assert read_nvml(uuid, lambda name: nvml) == found  # type: ignore[arg-type,return-value]
    assert nvml.open == 0


def test_no_management_library() -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert read_nvml("GPU-1", absent) == NvmlFacts()


def test_facts_are_one_line() -> None:
    facts = CudaFacts(
        name="NVIDIA H200",
        capability=(9, 0),
        num_sms=132,
        total_memory=140 * 1024**3,
        free_memory=139 * 1024**3,
        others_memory=0,
        driver_version="580.1",
        runtime_version="13.0",
        torch_version="2.11",
    )
    assert str(facts) == ("NVIDIA H200, sm_90, 132 multiprocessors, 140.0 GiB; driver 580.1, CUDA 13.0, PyTorch 2.11")

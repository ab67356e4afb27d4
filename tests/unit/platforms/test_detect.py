"""`auto` by what the driver says, without torch and without a driver."""

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest

from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.platforms.detect import DriverProbe, check_gpus, probe_driver, resolve_device, torch_cuda_version

GOOD = DriverProbe(capability=(9, 0))
OLD = DriverProbe(capability=(7, 5))
NONE = DriverProbe(missing="there is no NVIDIA driver")


class Driver:
    """A driver library whose calls answer what they are told."""

    def __init__(self, init: int = 0, count: int = 2, attributes: tuple[int, int] = (9, 0)) -> None:
        self._init, self._count, self._attributes = init, count, attributes

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, out: "ctypes._Pointer[ctypes.c_int]") -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return 0

    def cuDeviceGetAttribute(self, out: "ctypes._Pointer[ctypes.c_int]", attribute: int, device: int) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self._attributes[attribute - 75]
        return 0

    def cuDeviceTotalMem_v2(self, out: "ctypes._Pointer[ctypes.c_size_t]", device: int) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_size_t))[0] = 80 << 30
        return 0


def answering(driver: Driver) -> Callable[[str], ctypes.CDLL]:
    return lambda name: driver  # type: ignore[return-value,unused-ignore]


def test_a_machine_without_a_driver() -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert probe_driver(absent).missing == "there is no NVIDIA driver"


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (Driver(), DriverProbe(capability=(9, 0), memory=80 << 30, count=2)),
        (Driver(attributes=(8, 6)), DriverProbe(capability=(8, 6), memory=80 << 30, count=2)),
        (Driver(init=100), DriverProbe(missing="the driver sees no GPU")),
        (Driver(init=803), DriverProbe(missing="the driver fails to start (CUDA error 803)")),
        (Driver(count=0), DriverProbe(missing="the driver sees no GPU")),
    ],
)
def test_what_a_driver_says(driver: Driver, found: DriverProbe) -> None:
    assert probe_driver(answering(driver)) == found


@pytest.mark.parametrize(
    ("asked", "probe", "built_for", "device", "reason"),
    [
        ("auto", GOOD, "13.0", "cuda", "there is a GPU"),
        ("auto", NONE, "13.0", "cpu", "no NVIDIA driver"),
        ("auto", GOOD, "", "cpu", "build without CUDA"),
        ("auto", OLD, "13.0", "cpu", "capability 7.5 is below 8.0"),
        ("cpu", GOOD, "13.0", "cpu", "as asked"),
        ("cuda", GOOD, "13.0", "cuda", "as asked"),
        ("cuda", OLD, "13.0", "cuda", "as asked"),
    ],
)
def test_the_choice(asked: str, probe: DriverProbe, built_for: str, device: str, reason: str) -> None:
    found = resolve_device(asked, lambda: probe, lambda: built_for)
    assert found.device == device and reason in found.reason


@pytest.mark.parametrize(
    ("parallel", "count", "why"),
    [
        (
            Parallel(tp=2),
            1,
            "-tp 2 needs 2 GPUs, and this process sees 1: use one device (no -tp and no -pp), make more",
        ),
        (
            Parallel(tp=2, pp=2),
            3,
            "-tp 2 -pp 2 needs 4 GPUs, and this process sees 3: use -tp 2, make more GPUs visible",
        ),
        (
            Parallel(tp=8),
            6,
            "-tp 8 needs 8 GPUs, and this process sees 6: use -tp 4, make more GPUs visible (CUDA_VISIBLE",
        ),
        (Parallel(pp=2), 0, "-pp 2 needs 2 GPUs, and this process sees 0: use one device"),
        (Parallel(tp=2), 2, ""),
        (Parallel(), 0, ""),
    ],
)
def test_ranks_need_a_gpu_each(parallel: Parallel, count: int, why: str) -> None:
    def probe() -> DriverProbe:
        return probe_driver(answering(Driver(count=count)))

    if not why:
        check_gpus(parallel, probe)
        return
    with pytest.raises(ConfigError) as refused:
        check_gpus(parallel, probe)
    assert str(refused.value).startswith(why) and str(refused.value).endswith("or use --device cpu.")


@pytest.mark.parametrize(
    ("probe", "built_for", "why"),
    [(NONE, "13.0", "there is no NVIDIA driver"), (GOOD, "", "PyTorch is a build without CUDA")],
)
def test_a_gpu_that_is_not_there(probe: DriverProbe, built_for: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_device("cuda", lambda: probe, lambda: built_for)
    assert str(refused.value).startswith("no CUDA device: ") and why in str(refused.value)
    assert str(refused.value).endswith("; use --device cpu.")


def test_the_build_of_torch_is_read_not_imported() -> None:
    import torch

    expected = ".".join((torch.version.cuda or "").split(".")[:2])
    assert torch_cuda_version() == expected
    code = (
        "import sys; from quire.platforms import cuda, detect; detect.resolve_device('auto'); "
        "detect.torch_cuda_version(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"

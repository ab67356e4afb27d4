"""The kernel of products of one row: it compiles for the shapes of models, no thread has a stack, and a block fits."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels import cuda_source, nvrtc
from quire.kernels.linear import weight_only_hopper
from quire.kernels.one_row import product
from quire.kernels.one_row.product import Form, Weight, kernel_of, shared_bytes, takes, tiling_of

from ...support.cubins import resources
from ...support.one_row import SHARED
from ...support.quantized_cases import WEIGHT_ONLY, make_matrix

REGISTERS, MOST_OWN = 1 << 16, 12  # of a multiprocessor; units of a block in the largest weights of an 8B
# of models with 8, 70 and 405 billion parameters, and with experts of 768 columns
FORMS = [
    *(Form(bits, 4096, norm=True) for bits in (8, 4)),
    *(Form(bits, 4096, True, norm=True) for bits in (8, 4)),
    *(Form(bits, 12288) for bits in (8, 4)),
    *(Form(bits, 8192, True, norm=True) for bits in (8, 4)),
    *(Form(bits, 28672) for bits in (8, 4)),
    *(Form(bits, 53248) for bits in (8, 4)),
    *(Form(bits, 4096, norm=True, wide=True) for bits in (8, 4)),
    Form(8, 4096, True, norm=True, powers=True),
    Form(8, 10240, True, norm=True),  # four steps ahead, and three
    Form(8, 12288, True, norm=True),
    Form(8, 2048, True, picks=8),
    Form(8, 768, picks=8, down=True),
]


def test_shared_memory_is_enough() -> None:
    assert max(shared_bytes(form, tiling_of(form), MOST_OWN) for form in FORMS) <= SHARED


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_without_a_stack(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiprocessor has registers for one block, not for two."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    told = resources(kernel_of(form, tiling_of(form)).source, tmp_path)
    assert "STACK:0 " in told and "LOCAL:0 " in told, told
    (registers,) = map(int, re.findall(r"REG:(\d+)", told))
    assert REGISTERS // 2 < registers * tiling_of(form).warps * 32 <= REGISTERS


class Row:
    """A row of the GPU, as far as `takes` asks for it."""

    dtype, device = torch.bfloat16, torch.device("cuda")

    def __init__(self, inputs: int) -> None:
        self.shape = 1, inputs

    def __len__(self) -> int:
        return 1

    def stride(self, dim: int) -> int:
        return self.shape[1] if dim == 0 else 1

    def data_ptr(self) -> int:
        return 0


@pytest.fixture
def four_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with kernels in CUDA C++ and 99 KiB of shared memory for a block."""
    monkeypatch.setattr(cuda_source, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(product, "multiprocessors", lambda: 4)
    monkeypatch.setattr(product, "shared_memory", lambda: 99 << 10)


@pytest.mark.usefixtures("four_multiprocessors")
def test_rows_elsewhere_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU, too, Triton's interpreter has its rows on the CPU."""
    scales = torch.empty(0)
    weight, form = Weight(scales, scales, None, 256), Form(8, 512)
    assert takes(form, Row(512), weight, "")  # type: ignore[arg-type]
    for device in ("cpu", "meta"):
        assert not takes(form, torch.empty(1, 512, dtype=torch.bfloat16, device=device), weight, "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert not takes(form, Row(512), weight, ""), "it was measured on Hopper alone"  # type: ignore[arg-type]


@pytest.mark.usefixtures("four_multiprocessors")
def test_rows_too_long_for_the_shared_memory_of_a_gpu_are_not_taken() -> None:
    scales = torch.empty(0)
    taken = [takes(Form(8, k), Row(k), Weight(scales, scales, None, 256), "") for k in (28672, 53248)]  # type: ignore[arg-type]
    assert taken == [True, False]


class Sizes(TorchDispatchMode):
    """The sizes of memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if "new_empty" in str(func):
            self.made.append(result.numel())
        return result


def test_a_norm_of_many_rows_makes_no_memory_that_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of prompts would hold one more result of its widest product."""
    packed = weight_only_hopper.pack_gated(make_matrix(WEIGHT_ONLY["w4 128"], 128, 256, torch.device("cpu")))
    assert isinstance(packed, weight_only_hopper.WeightWords)
    x, norm = torch.ones(300, 256), torch.ones(256)

    def same(x: Tensor, *_: object) -> Tensor:
        return x

    for name in ("rms_norm", "run", "run_gated"):
        monkeypatch.setattr(weight_only_hopper, name, same)
    with Sizes() as sizes:
        assert weight_only_hopper.run_norm(x, norm, 1e-6, packed, None) is x
        assert weight_only_hopper.run_norm_gated(x, norm, 1e-6, packed, None) is x
    assert not sizes.made

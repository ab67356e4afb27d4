"""Compiles the kernels of Mamba 2 and of short convolutions for sm_90 at the sizes of real models; prints each."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.mamba import MambaForm, MambaWeights, triton
from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.shortconv import triton as shortconv
from quire.kernels.states import StateMeta, StateView

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made

FORMS = {
    "Nemotron 3 Nano": MambaForm(heads=64, groups=8, head_dim=64, state_dim=128),
    "Granite 4 H Small": MambaForm(heads=128, groups=1, head_dim=64, state_dim=128),
    "Falcon-H1 34B": MambaForm(heads=32, groups=2, head_dim=128, state_dim=256, norm=""),
    "Falcon-H1 0.5B": MambaForm(heads=24, groups=1, head_dim=64, state_dim=128, norm="first"),
}


USUAL = tuple(FORMS.values())[:: 1 if FULL else 2]  # the others: --full
CHANNELS, TAPS = 2048, 3  # of LFM2 1.2B and 8B-A1B


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_of(seqs: int, most: int) -> StateMeta:
    """The metadata of `seqs` sequences of at most `most` rows."""
    sizes = (seqs + 1,), (seqs,), (seqs,), (seqs, 2), (seqs, 2)
    return StateMeta(*(empty(*size, dtype=torch.int32) for size in sizes), max_rows=most)


def launch(
    form: MambaForm,
    seqs: int,
    rows: int,
    most: int,
    dtype: torch.dtype = torch.bfloat16,
    matrix_dtype: torch.dtype = torch.float32,
    pending: int = 0,
) -> None:
    """A step of Mamba 2. pending: pending rows of a state."""
    floats, heads = torch.float32, form.heads
    sizes = (4, form.channels), (heads,), (heads,), (heads,), (form.channels,), (form.width,)
    weights = MambaWeights(*(empty(*size, dtype=floats) for size in sizes))
    matrix = empty(seqs + 9, heads, form.state_dim, form.head_dim, dtype=matrix_dtype)
    state = StateView(empty(seqs + 9, 3, form.channels, dtype=dtype), matrix)
    if pending:
        later = empty(seqs + 9, pending, form.channels + heads, dtype=dtype)
        state = replace(state, pending=later, at=empty(seqs + 9, 1, dtype=torch.int32))
    widths = [form.width, form.channels, heads]
    gate, inner, step = empty(rows, sum(widths), dtype=dtype).split(widths, 1)
    triton.mix(inner, gate, step, weights, state, meta_of(seqs, most), form)


def check(made: Made) -> None:
    """Decodes spill no register, prompts of two-byte numbers next to none; no product of the scan is a warpgroup's."""
    if made.name == "_scan_kernel":  # see its docstring
        assert "wgmma" not in made.ptx, made
    if made.name == "_decode_kernel":
        assert made.options["maxnreg"] == 128, made
    if made.name == "_decode_kernel" or "*bf16" in made.signature.values():
        halved = made.signature.get("matrix") == "*bf16"  # four registers of a thread go to the stack
        assert made.stack <= (16 * halved if made.name == "_decode_kernel" else 80), (made.stack, made)


def main() -> None:
    """Decodes with dependent launches, and prompts; with --full decodes without them, and prompts of all forms."""
    AbsentGpu(check)
    for dependent in (*full_rows([False]), True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for form in USUAL:
            launch(form, 32, 32, 1)
    for form in (USUAL[0], *full_rows(USUAL[1:])):
        launch(form, 256, 512, 512)
        for dtype in full_rows((torch.float16, torch.float32)):
            launch(form, 256, 512, 512, dtype)
    nano = FORMS["Nemotron 3 Nano"]
    for form in USUAL:
        launch(form, 32, 128, 4, pending=4)
    for given in ((32, 32, 1), *full_rows([(256, 512, 512)])):
        launch(nano, *given, matrix_dtype=torch.bfloat16)


def short() -> None:
    """Short convolutions: decodes with and without dependent launches, and prompts."""
    AbsentGpu(check_short)
    weights = ShortConvWeights(empty(TAPS, CHANNELS, dtype=torch.float32))
    state = StateView(empty(41, TAPS - 1, CHANNELS))
    for dependent, rows, most in ((False, 32, 1), (True, 32, 1), (True, 512, 512)):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        shortconv.mix(empty(rows, 3 * CHANNELS), weights, state, meta_of(32, most))
    drafted = replace(state, pending=empty(41, 4, CHANNELS), at=empty(41, 1, dtype=torch.int32))
    shortconv.mix(empty(128, 3 * CHANNELS), weights, drafted, meta_of(32, 4))


def check_short(made: Made) -> None:
    """No register is spilled."""
    assert made.stack == 0, (made.stack, made)

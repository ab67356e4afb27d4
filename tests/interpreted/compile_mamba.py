"""Compiles the kernels of Mamba 2 for sm_90 at the sizes of real models; prints each kernel."""

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.mamba import MambaForm, MambaWeights, triton
from quire.kernels.states import StateMeta, StateView

from ..support.full import full_rows
from .compiling import AbsentGpu, Made

FORMS = {
    "Nemotron 3 Nano": MambaForm(heads=64, groups=8, head_dim=64, state_dim=128),
    "Granite 4 H Small": MambaForm(heads=128, groups=1, head_dim=64, state_dim=128),
    "Falcon-H1 34B": MambaForm(heads=32, groups=2, head_dim=128, state_dim=256, norm=""),
    "Falcon-H1 0.5B": MambaForm(heads=24, groups=1, head_dim=64, state_dim=128, norm="first"),
}


def launch(form: MambaForm, seqs: int, rows: int, most: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """A step of `seqs` sequences of at most `most` rows, on tensors without storage."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    floats, ints, heads = torch.float32, torch.int32, form.heads
    sizes = (4, form.channels), (heads,), (heads,), (heads,), (form.channels,), (form.width,)
    weights = MambaWeights(*(empty(*size, dtype=floats) for size in sizes))
    matrix = empty(seqs + 9, heads, form.state_dim, form.head_dim, dtype=floats)
    state = StateView(empty(seqs + 9, 3, form.channels), matrix)
    lists = (empty(seqs + 1, dtype=ints), *(empty(seqs, dtype=ints) for _ in range(2)))
    meta = StateMeta(*lists, *(empty(seqs, 2, dtype=ints) for _ in range(2)), max_rows=most)
    widths = [form.width, form.channels, heads]
    gate, inner, step = empty(rows, sum(widths)).split(widths, 1)
    triton.mix(inner, gate, step, weights, state, meta, form)


def check(made: Made) -> None:
    """Decodes spill no register, prompts of two-byte numbers next to none; no product of the scan is a warpgroup's."""
    if made.name == "_scan_kernel":  # see its docstring
        assert "wgmma" not in made.ptx, made
    if made.name == "_decode_kernel" or "*bf16" in made.signature.values():
        assert made.stack <= (0 if made.name == "_decode_kernel" else 80), (made.stack, made)


def main() -> None:
    """Decodes with and without dependent launches, and prompts."""
    AbsentGpu(check)
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for form in FORMS.values():
            launch(form, 32, 32, 1)
    for form in FORMS.values():
        launch(form, 256, 512, 512)
        for dtype in full_rows((torch.float16, torch.float32)):
            launch(form, 256, 512, 512, dtype)

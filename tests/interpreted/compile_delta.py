"""Compiles the kernels of the gated delta rule for sm_90 at the sizes of real models; prints each kernel."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.delta import DeltaForm, DeltaWeights, triton
from quire.kernels.states import StateMeta, StateView

from ..support.full import full_rows
from .compiling import AbsentGpu, Made

# Key heads and heads: Qwen3.5 9B and 35B-A3B; with --full 0.8B, Qwen3-Next on two ranks and on one, Qwen3.5 27B.
HEADS = ((16, 16), (16, 32))
KIMI = (32, 32)  # Kimi-Linear, with decays by channel


def launch(
    heads: tuple[int, int],
    seqs: int,
    rows: int,
    most: int,
    dtype: torch.dtype = torch.bfloat16,
    few: int = 1,
    pending: int = 0,
    matrix: torch.dtype = torch.float32,
    by_channel: bool = False,
) -> None:
    """A step of `seqs` sequences of at most `most` rows, decodes of at most `few`, on tensors without storage.

    pending   pending rows of a state
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    form = DeltaForm(key_heads=heads[0], heads=heads[1], key_dim=128, value_dim=128, eps=1e-6)
    wide, floats, ints = form.heads * form.value_dim, torch.float32, torch.int32
    decays = form.heads * (form.key_dim if by_channel else 1)
    sizes = (4, form.channels), heads[1:], (decays,), (128,)
    weights = DeltaWeights(*(empty(*size, dtype=floats) for size in sizes))
    state = StateView(empty(seqs + 9, 3, form.channels), empty(seqs + 9, form.heads, 128, 128, dtype=matrix))
    if pending:
        width = form.channels + decays + form.heads
        state = replace(state, pending=empty(seqs + 9, pending, width), at=empty(seqs + 9, 1, dtype=ints))
    lists = (empty(seqs + 1, dtype=ints), *(empty(seqs, dtype=ints) for _ in range(2)))
    meta = StateMeta(*lists, *(empty(seqs, 2, dtype=ints) for _ in range(2)), max_rows=most, decode_rows=few)
    mixed, rates = empty(rows, form.channels + wide), empty(rows, form.heads + decays)
    given = mixed[:, : form.channels], mixed[:, form.channels :], rates[:, form.heads :], rates[:, : form.heads]
    triton.mix(*given, weights, state, meta, form)


def check(made: Made) -> None:
    """Decodes spill no register, drafts hardly one, with pending rows some; prompts next to none."""
    if made.name == "_decode_kernel":
        assert made.stack == 0, (made.stack, made)
    elif made.name == "_rows_kernel":
        most = 0 if made.constants["ONE"] else 288 if made.constants["MOST"] else 64
        assert made.stack <= most and made.options["maxnreg"] == 128, (made.stack, made)
    elif made.name != "_outputs_kernel" and made.constants.get("BY_CHANNEL", made.name == "_scan_kernel"):
        assert "wgmma" not in made.ptx, made  # see `_scan_kernel`
    if made.name not in ("_decode_kernel", "_rows_kernel") and "*bf16" in made.signature.values():
        assert made.stack <= 80, (made.stack, made)


def main() -> None:
    """Decodes with dependent launches, drafts, and prompts; with --full also decodes without them."""
    AbsentGpu(check)
    for dependent in (*full_rows([False]), True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for heads in (HEADS[1], *full_rows((HEADS[0], (8, 16), (16, 48), (16, 64)))):
            launch(heads, 32, 32, 1)
    for heads in (*HEADS[1:], *full_rows((HEADS[0], (16, 48)))):
        launch(heads, 256, 512, 512)
    launch(KIMI, 256, 512, 512, few=0, by_channel=True)
    for given in full_rows([(1, 512, 512, 0), (32, 128, 4, 4)]):
        launch(HEADS[1], *given[:3], few=given[3])
    launch(HEADS[1], 32, 128, 4, few=4, pending=4)
    for given in ((32, 32, 1), *full_rows([(256, 512, 512)])):
        launch(HEADS[1], *given, matrix=torch.bfloat16)
    for pending in full_rows([4]):
        launch(HEADS[1], 32, 128, 4, few=4, pending=pending, matrix=torch.bfloat16)
    for dtype in full_rows((torch.float16, torch.float32)):
        launch(HEADS[1], 256, 512, 512, dtype)
        launch(KIMI, 256, 512, 512, dtype, few=0, by_channel=True)

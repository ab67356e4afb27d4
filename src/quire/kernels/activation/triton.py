"""silu(gate) * up in one pass. Floor: 3 numbers moved for each result; 8192 x 3072 in bfloat16 35 us at 4.3 TB/s."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.triton_runtime import jit, tl

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I]; gate is the first half of each row, up the second."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    if rows:
        in_pdl = pdl.in_use()
        _silu_kernel[(rows, -(-width // BLOCK))](
            gate_up, y, gate_up.stride(0), width, BLOCK, in_pdl, num_warps=4, **pdl.options(in_pdl)
        )
    return y


@jit
def silu(gate):
    """Return silu(gate) = gate * sigmoid(gate), in float32."""
    return gate / (1 + tl.exp(-gate))


@jit
def _silu_kernel(gate_up, y, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu(gate) * up for BLOCK columns of a row. Grid (rows, ceil(WIDTH / BLOCK)).

    gate_up   [rows, 2 WIDTH], gate first;  stride  elements from row to row
    y         [rows, WIDTH] contiguous
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < WIDTH
    gate = tl.load(gate_up + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + col, (silu(gate) * up).to(y.dtype.element_ty), mask=inside)

"""Compiles the small kernels of a step for sm_90 at the sizes of real models; prints each kernel."""

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation import ACTS, POINTWISE
from quire.kernels.activation import triton as activation
from quire.kernels.attention import KVView
from quire.kernels.heads import triton as heads
from quire.kernels.linear import cuda
from quire.kernels.norm import triton as norm
from quire.kernels.rope import triton as rope

from ..support.full import full_rows
from .compiling import AbsentGpu

EPS = 1e-5


def launch(rows: int, hidden: int, heads_of: tuple[int, int], inner: int, vocab: int, normed: bool) -> None:
    """A step's small kernels, on tensors without storage."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dim, (q_heads, kv_heads) = 128, heads_of
    positions = empty(rows, dtype=torch.int64)
    rotation = rope.rotation_rows(positions, empty(dim // 2, dtype=torch.float32), 1.0, torch.bfloat16)
    x, scale, all_heads = cuda.rows(empty(vocab, hidden), positions), empty(hidden), q_heads + 2 * kv_heads
    norm.rms_norm(x, scale, EPS)
    for act in ACTS:
        activation.gated(empty(rows, 2 * inner), act)
    for act in POINTWISE:
        activation.pointwise(empty(rows, inner), act)
    activation.opened(*empty(rows, 2 * inner).chunk(2, 1))
    arena = empty(9, 28, 2, kv_heads, 64, dim)
    head_norm, kv = empty(q_heads + kv_heads, dim) if normed else None, KVView(arena[:, 3, 0], arena[:, 3, 1])
    heads.prepare(empty(rows, all_heads, dim), head_norm, EPS, *rotation, kv, positions)
    if cuda.few(rows, empty(1, hidden)):
        cuda.run_norm(x, scale, EPS, empty(all_heads * dim, hidden), None)
        cuda.run_add(empty(rows, q_heads * dim), empty(hidden, q_heads * dim), None, x)
        cuda.run_norm_gated(x, scale, EPS, empty(2 * inner, hidden), None)
        cuda.run_add(empty(rows, inner), empty(hidden, inner), None, x)
    if cuda.few(rows, empty(vocab, 8)):
        cuda.run_float(x, empty(vocab, hidden), None)


def launch_values(rows: int) -> None:
    """Heads of Gemma 4: of layers with a window, of full ones and of those without KV; the last norm of a layer."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for dim, kv_heads, values in ((256, 16, "normed"), (512, 4, "keys"), (256, 16, "kept")):
        stored = kv_heads * {"normed": 2, "keys": 1, "kept": 0}[values]
        kv = KVView(*(empty(9, kv_heads, 64, dim) for _ in range(2)))
        head_norm = empty(32 + kv_heads * (values != "kept"), dim)
        turn = empty(rows, dim), empty(rows, dim)
        heads.prepare(empty(rows, 32 + stored, dim), head_norm, EPS, *turn, kv, empty(rows, dtype=torch.int64), values)
    x, factor = empty(rows, 5376), empty(1, dtype=torch.float32)
    norm.rms_norm(x, empty(5376), EPS, x, factor)


def main() -> None:
    """qwen3-0.6b with and without dependent launches, the wider and deeper shapes of an 8b model, heads of Gemma 4."""
    AbsentGpu()
    for dependent, some in (False, (1, 8, 8192)), (True, (16,)):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for rows in (*some, *full_rows((1, 4, 8, 16, 64, 8192))):
            launch(rows, 1024, (16, 8), 3072, 151936, True)
    launch_values(4)
    for rows in (4, *full_rows((1, 16))):
        launch(rows, 4096, (32, 8), 14336, 128256, False)

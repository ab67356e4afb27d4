"""Compiles the kernels of `--batch-invariant` for Hopper, at the sizes of Qwen3 8B; prints the name of each kernel."""

import torch

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.invariant import attention, linear, linear_hopper

from ..support.full import FULL
from .compiling import AbsentGpu, Made


def check(made: Made) -> None:
    """Attention keeps its sums in registers: rows of decodes and of prompts are a warpgroup's product."""
    if made.name == "_attend_kernel":
        assert "wgmma" in made.ptx and (made.stack <= 64 or made.constants["D"] > 128), (made.stack, made)


def main() -> None:
    """A decode step, and a step with prompts and a window."""
    AbsentGpu(check).describe_to(attention)

    def attend(lengths: list[int], window: int | None, size: int, dim: int) -> None:
        seqs = len(lengths)
        like = {"device": "meta"}
        meta = AttentionMeta(
            query_start=torch.empty(seqs + 1, dtype=torch.int32, **like),
            seq_lens=torch.empty(seqs, dtype=torch.int32, **like),
            block_tables=torch.empty(seqs, 64, dtype=torch.int32, **like),
            kv_slots=torch.empty(sum(lengths), dtype=torch.int64, **like),
            table_rows=torch.empty(seqs, dtype=torch.int32, **like),
            max_query_len=max(lengths),
        )
        page = torch.empty(100, 8, size, dim, dtype=torch.bfloat16, **like)
        q = torch.empty(sum(lengths), 32, dim, dtype=torch.bfloat16, **like)
        attention.paged_attention(q, KVView(page, page), meta, 0.1, window)

    attend([1] * 16, None, 128, 128)
    attend([1, 700], 512, 64, 64)
    if FULL:
        attend([1, 700], None, 128, 256)


def products() -> None:
    """Products of a layer of Qwen3 8B, of few rows, of a large batch and of prompts; and of its head."""
    AbsentGpu(check).describe_to(linear_hopper)

    def launch(rows: int, n: int, k: int, **more: bool) -> None:
        gated, dtype = more.get("gated", False), torch.float32 if more.get("head") else torch.bfloat16
        x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(n << gated, k, dtype=torch.bfloat16, device="meta")
        y = torch.empty(rows, n, dtype=dtype, device="meta")
        bias = torch.empty(n << gated, dtype=torch.bfloat16, device="meta") if more.get("biased") else None
        residual = y if more.get("residual") else None
        linear_hopper.product(x, weight, bias, y, residual=residual, act="silu" * gated)

    for rows, dependent in (1, True), (256, False), (8192, False):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        launch(rows, 4096, 12288, residual=True)
        launch(rows, 12288, 4096, gated=True)
        if FULL:
            launch(rows, 6144, 4096, biased=True)
            launch(rows, 5000, 1000, gated=True, biased=True)
    launch(256, 151936, 4096, head=True)


def elsewhere() -> None:
    """The product for other GPUs, and that of float32."""
    AbsentGpu(check)
    for dtype, rows in (torch.bfloat16, 1), (torch.bfloat16, 300), (torch.float32, 300):
        x = torch.empty(rows, 1000 + 4 * FULL, dtype=dtype, device="meta")
        linear.run(x[:, :1004], torch.empty(96, 1004, dtype=dtype, device="meta"), None)

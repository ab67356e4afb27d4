"""Compiles the kernels of an 8-bit KV cache at the sizes of an 8B model and of DeepSeek-V2-Lite; prints their names."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, SharedBlocks, triton, triton_plan
from quire.kernels.attention import hopper as attention_hopper
from quire.kernels.heads import triton as heads
from quire.kernels.latent import LatentView, hopper
from quire.kernels.latent import triton as latent

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def check(made: Made) -> None:
    """Many rows run on Hopper's tensor cores; kernels spill few registers, and those of dense decodes none.

    Decodes load codes in words.
    """
    many = made.name in ("prefill_kernel", "prefix_kernel") or (
        made.constants.get("M", 0) >= 64 and made.name != "merge_kernel"
    )
    assert not many or made.options["target"].arch < 90 or "wgmma" in made.ptx, made
    assert made.name not in ("decode_kernel", "prefix_kernel") or made.stack == 0, (made.stack, made)
    assert made.stack <= 64, (made.stack, made)
    assert made.name not in ("decode_kernel", "absorbed_kernel") or made.byte_loads == 0, (made.byte_loads, made)


def launch_heads(cache: torch.dtype, tokens: int, *, few: bool = True, many: bool = True) -> None:
    """Launch the operations of a layer; its attention for decodes, with a shared prefix and without, and prompts."""
    arena = empty(9, 28, 2, 8, 128, 128, dtype=cache)
    kv = KVView(arena[:, 3, 0], arena[:, 3, 1], 0.5, 0.25)
    heads.prepare(
        empty(tokens, 48, 128),
        empty(40, 128),
        1e-6,
        empty(tokens, 128),
        empty(tokens, 128),
        kv,
        empty(tokens, dtype=torch.int64),
    )
    decodes = ((1, SharedBlocks(ints(9), ints(64), ints(64), ints(64))), *full_rows([(1, None)]))
    for longest, shared in (*decodes * few, *((tokens, None),) * many):
        meta = AttentionMeta(ints(65), ints(64), ints(99, 512), ints(9), ints(64), longest, 1, shared)
        triton.paged_attention(empty(tokens, 32, 128), kv, meta, 0.1)
    if tokens > 64:
        known = replace(meta, prompts=((0, tokens, 0, 9000),), plans={})
        attention_hopper.paged_attention(empty(tokens, 32, 128), kv, known, 0.1)
        assert ("pages", 128, None, 1024) in known.plans


def launch_latents(cache: torch.dtype, tokens: int) -> None:
    pages = empty(9, 27, 576 * 128, dtype=cache)[:, 3]
    kept = LatentView(pages[:, : 512 * 128].view(9, 1, 128, 512), pages[:, 512 * 128 :].view(9, 1, 128, 64), 0.5)
    q, down = empty(tokens, 16, 192), empty(tokens, 576)
    latent.prepare(
        q, down, empty(512), 1e-6, empty(tokens, 64), empty(tokens, 64), kept, empty(tokens, dtype=torch.int64)
    )
    shared = SharedBlocks(ints(9), ints(64), ints(64), ints(64))
    prompts = ((0, tokens, 0, 4096),)
    for longest, given in ((tokens, shared), *full_rows(((1, None), (1, shared), (tokens, None)))):
        meta = AttentionMeta(ints(65), ints(64), ints(99, 512), ints(9), ints(64), longest, 1, given, prompts)
        latent.absorbed(empty(tokens, 16, 512), q[..., 128:], kept, meta, 0.1)
    hopper.expanded(q, empty(16, 256, 512), kept, meta, 0.1, empty(tokens, 16, 128))


def absent_gpu() -> AbsentGpu:
    """A Hopper GPU, whose sizes the modules know."""
    gpu = AbsentGpu(check)
    gpu.describe_to(triton_plan, triton, attention_hopper, latent, hopper)
    return gpu


def dense() -> None:
    """Decodes in one type and a prompt in the other on Hopper; with --full both in both types."""
    absent_gpu()
    launch_heads(torch.float8_e4m3fn, 64, many=FULL)
    launch_heads(torch.float8_e5m2, 4096, few=FULL)
    if FULL:
        launch_heads(torch.float8_e5m2, 64)
        launch_heads(torch.float8_e4m3fn, 4096)


def latents() -> None:
    """Steps of latent attention on Hopper."""
    absent_gpu()
    launch_latents(torch.float8_e4m3fn, 512)


def older() -> None:
    """Dense attention in both types on a GPU of capability 8.9 with less shared memory."""
    gpu = absent_gpu()
    gpu.capability, gpu.room = 89, 99 << 10
    launch_heads(torch.float8_e5m2, 64)
    launch_heads(torch.float8_e4m3fn, 64)

"""Compiles attention for sm_90 at the sizes of real models, for a large and a small GPU; prints each kernel."""

from dataclasses import replace
from typing import Any

import torch

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, KVView, SharedBlocks, hopper, triton, triton_plan
from quire.kernels.joined import decode_attention

from ..support.full import FULL
from .compiling import AbsentGpu, Made

_, SHARED, _, MIXED, PROMPT = STEPS = (
    (64, 1, False),
    (64, 1, True),
    (256, 4, False),
    (64, 64, False),
    (4096, 4096, False),
)  # (tokens, longest, with a shared prefix)


def launch(
    block_size: int, heads: tuple[int, int], dim: int, some: tuple[tuple[int, int, bool], ...] = STEPS, **options: Any
) -> None:
    """Launch a layer of every kind of step, or of some, on tensors without storage."""
    meta_device, dtype = torch.device("meta"), options.pop("dtype", torch.bfloat16)
    arena = torch.empty(9, 28, 2, heads[1], block_size, dim, dtype=dtype, device=meta_device)
    kv = KVView(arena[:, 3, 0], arena[:, 3, 1])
    ints = lambda *size: torch.empty(size, dtype=torch.int32, device=meta_device)  # noqa: E731
    shared = SharedBlocks(ints(9), ints(64), ints(64), ints(64))
    for tokens, longest, given in STEPS if FULL else some:
        group = shared if given else None
        meta = AttentionMeta(ints(65), ints(64), ints(99, 512), ints(9), ints(64), longest, min(longest, 4), group)
        q = torch.empty(tokens, heads[0] + 2 * heads[1], dim, dtype=dtype, device=meta_device)
        queries, k, v = q.split((heads[0], heads[1], heads[1]), 1)
        rows = replace(meta, decode_len=0, row_positions=ints(tokens).long())
        steps = [meta, rows] if tokens == PROMPT[0] or FULL and longest == tokens else [meta]
        on_hopper = dtype != torch.float32 and (tokens == PROMPT[0] or FULL)
        for module in (triton, hopper) if on_hopper else (triton,):
            for step in steps if FULL or module is hopper or not on_hopper else ():
                module.paged_attention(queries, kv, replace(step, plans={}), 0.1, **options)


def check(made: Made) -> None:
    """Decodes from the projection on keep their numbers in registers, and read keys and values before they wait."""
    if made.name == "_headed_kernel":
        before, _, _ = made.ptx.rpartition("griddepcontrol.wait")
        before = before.rpartition("griddepcontrol.wait")[0] if before.count("griddepcontrol.wait") > 1 else before
        tile = 2 * made.constants["TILE"] * made.constants["D"] * 2 // (16 * 32 * made.options["num_warps"])
        assert made.stack == 0 and made.loads_ahead >= tile, (made.stack, made.loads_ahead, made)
        assert before.count("ld.global.v4") >= tile and before.count("ldmatrix") >= 8, made


def launch_headed(heads: tuple[int, int], dim: int, tokens: int, *, normed: bool = True, **options: Any) -> None:
    """Launch decodes from the projection on."""
    empty = lambda *size: torch.empty(size, dtype=torch.bfloat16, device="meta")  # noqa: E731
    ints = lambda *size: torch.empty(size, dtype=torch.int32, device="meta")  # noqa: E731
    arena = empty(9, 28, 2, heads[1], 128, dim)
    norm = empty(sum(heads), dim) if normed else None
    given = decode_attention.HeadInputs(norm, 1e-6, empty(tokens, dim), empty(tokens, dim))
    meta = AttentionMeta(ints(tokens + 1), ints(tokens), ints(99, 512), ints(tokens).long(), ints(tokens), 1)
    qkv = empty(tokens, heads[0] + 2 * heads[1], dim)
    decode_attention.attention(qkv, given, KVView(arena[:, 3, 0], arena[:, 3, 1]), meta, 0.1, **options)


def absent_gpu(room: int = AbsentGpu.HOPPER) -> None:
    """Stand for a Hopper GPU, or for one with less shared memory."""
    gpu = AbsentGpu(check, room=room)
    gpu.describe_to(triton_plan, triton, hopper)
    setattr(pdl, "in_use", lambda: True)  # noqa: B010


def decodes() -> None:
    """Decode steps with a shared prefix on a large GPU, and from the projection on; with --full also others."""
    absent_gpu()
    launch(128, (32, 8), 128, (SHARED,))
    launch_headed((32, 8), 128, 1)
    launch_headed((64, 8), 64, 16, normed=False, window=128, sinks=torch.empty(64, device="meta"))
    if FULL:
        launch_headed((16, 8), 128, 16)
        launch_headed((32, 4), 128, 4)
        launch_headed((16, 8), 256, 1, soft_cap=50.0)


def prompts() -> None:
    """A prompt on a large GPU: Hopper's kernel, and Triton's for rows whose positions are given."""
    absent_gpu()
    launch(128, (32, 8), 128, (PROMPT,))


def wide() -> None:
    """Prompts of heads of 256 with a window and a soft cap, and of heads of 512."""
    absent_gpu()
    launch(128, (16, 8), 256, (PROMPT,), window=1024, soft_cap=50.0)
    launch(128, (32, 4), 512, (PROMPT,))


def small() -> None:
    """Prompts beside decodes on a GPU with less shared memory, once in chunks; with --full each variant once."""
    absent_gpu(99 << 10)
    launch(64, (16, 8), 128, (SHARED, MIXED))
    launch(64, (16, 8), 128, (MIXED,), window=-8192)
    if not FULL:
        return
    launch(96, (16, 2), 128)
    launch(16, (32, 8), 64)
    launch(64, (32, 8), 128, window=4096, soft_cap=50.0)
    launch(128, (32, 4), 128)
    launch(128, (64, 4), 128, dtype=torch.float16)
    launch(64, (64, 8), 64, sinks=torch.empty(64, device="meta"), window=128)
    launch(64, (8, 4), 256, dtype=torch.float16)
    launch(64, (4, 2), 64, dtype=torch.float32)

"""Compiles latent attention for sm_90 at the sizes of DeepSeek-V2-Lite and V3; prints the name of each kernel."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, SharedBlocks, triton_plan
from quire.kernels.latent import LatentView, hopper, triton, triton_project
from quire.kernels.latent.parts import TAIL

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made


def check(made: Made) -> None:
    """Many rows run on Hopper's tensor cores; what reads for all spills no register."""
    wide = made.name.endswith("expanded_kernel") or made.constants.get("M", 0) >= 64
    assert not wide or "*bf16" not in made.signature.values() or "wgmma" in made.ptx, made
    assert made.name != "shared_kernel" or made.stack == 0, (made.stack, made)


def launch(
    tokens: int, longest: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16, few: int = 1, seqs: int = 64
) -> None:
    """Launch a layer of a step, in the middle of an arena, on tensors without storage.

    Without --full, projections are those of a mixed step, no prompt is absorbed, and other steps have shared prefixes.
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def ints(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int32)

    pages = empty(9, 27, 576 * size)[:, 3]
    cache = LatentView(pages[:, : 512 * size].view(9, 1, size, 512), pages[:, 512 * size :].view(9, 1, size, 64))
    slots = empty(tokens, dtype=torch.int64)
    prompts = ((0, tokens, 0, 4096),) if longest == tokens > 1 else None
    shared = SharedBlocks(ints(9), ints(seqs), ints(seqs), ints(seqs))
    meta = AttentionMeta(ints(seqs + 1), ints(seqs), ints(99, 512), slots, ints(seqs), longest, few, None, prompts)
    down = empty(tokens, heads * 192 + 576)
    q = down[:, :-576].view(tokens, heads, 192)
    triton.prepare(q, down[:, -576:], empty(512), 1e-6, empty(tokens, 64), empty(tokens, 64), cache, slots)
    up, latents = empty(heads, 256, 512), empty(tokens, heads, 512)
    absorbed = () if longest == tokens and not FULL else (replace(meta, shared=shared, plans={}),)
    for given in (*absorbed, *full_rows([meta])):
        triton.absorbed(latents, q[..., 128:], cache, given, 0.1)
    if heads == 128 and longest == 1:  # of eight ranks that divide contexts
        lse = empty(tokens, heads, dtype=torch.float32)
        triton.absorbed(latents, q[..., 128:], cache, replace(meta, plans={}), 0.1, lse)
        triton.join(empty(8, tokens, heads // 8, 512 + TAIL // 2))
    mixed, some = 1 < longest < tokens, replace(meta, decode_len=0, row_positions=slots, plans={})
    if mixed:
        triton.absorbed(latents, q[..., 128:], cache, some, 0.1)
    for rows in (min(tokens, most) for most in (3, 16, *full_rows((1, triton_project.MOST))) if mixed or FULL):
        triton.project(q[:rows, :, :128], up[:, :128], latents[:rows])
        triton.project(latents[:rows], up[:, 128:].transpose(1, 2), empty(rows, heads, 128))
    if prompts is not None:
        for module, given in ((triton, meta), (hopper, meta), (hopper, some)):
            module.expanded(q, empty(heads, 256, 512), cache, given, 0.1, empty(tokens, heads, 128))


STEPS = DECODES, _, MIXED, PROMPT = (64, 1, 1), (128, 2, 2), (512, 300, 1), (8192, 8192, 1)  # tokens, longest, few


def steps(one: tuple[int, int, int], heads: int, size: int, dependent: bool) -> AbsentGpu:
    """Launch a kind of steps on Hopper; with --full every kind."""
    gpu = AbsentGpu(check)
    gpu.describe_to(triton_plan, triton, hopper)
    setattr(pdl, "in_use", lambda: dependent)  # noqa: B010
    for tokens, longest, few in (one, *full_rows(STEPS)):
        launch(tokens, longest, heads, size, few=few)
    return gpu


def mixed() -> None:
    """Prompts and decodes in a step, in blocks of 64."""
    steps(MIXED, 16, 64, False)


def prompts() -> None:
    """A prompt; with --full also in float32."""
    steps(PROMPT, 16, 128, True)
    if FULL:
        launch(8, 1, 16, 128, seqs=8)  # a program for every lane adds up parts
        launch(8192, 8192, 16, 64, torch.float32)


def decodes() -> None:
    """Decodes of 128 heads, and of 16 heads on a small GPU."""
    gpu = steps(DECODES, 128, 128, True)
    gpu.room = 99 << 10
    for few in (1, *full_rows((4,))):
        launch(64, few, 16, 64, few=few)

"""Compiles latent attention over a cache of rows (fp8_ds_mla) for sm_90 at the sizes of DeepSeek-V3.2; prints each
kernel."""

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, SharedBlocks, triton_plan
from quire.kernels.latent import hopper, triton
from quire.kernels.latent.rows import row_view
from quire.kernels.latent_rows import latent_row

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made

L, R, LAYERS, SIZE, TOP_K = 512, 64, 61, 64, 2048


def check(made: Made) -> None:
    """Nothing spills, but 80 bytes of attention to chosen numbers. Many lanes run on Hopper's tensor cores."""
    assert made.stack <= 80 * (made.name == "chosen_kernel"), (made.stack, made)
    attends = made.name in ("absorbed_kernel", "shared_kernel", "chosen_kernel")
    assert not attends or made.constants["M"] < 64 or "wgmma" in made.ptx, made


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def launch(tokens: int, longest: int, heads: int, few: int = 1) -> None:
    """Launch the kernels of a layer of a step: all forms of attention, in the middle of an arena."""
    seqs = tokens if longest == 1 else 4
    pages = empty(9, LAYERS, 1, SIZE, latent_row(L, R).size, dtype=torch.uint8)
    cache = row_view(pages[:, 3], L, R)
    shared = SharedBlocks(ints(9), ints(seqs), ints(seqs), ints(seqs))
    known = ((0, tokens, 0, 4096),) if longest == tokens > 1 else ()
    slots = empty(tokens, dtype=torch.int64)
    meta = AttentionMeta(ints(seqs + 1), ints(seqs), ints(99, 512), slots, ints(seqs), longest, few, shared, known)
    down = empty(tokens, heads * 192 + L + R)
    q = down[:, : -L - R].view(tokens, heads, 192)
    triton.prepare(q, down[:, -L - R :], empty(L), 1e-6, empty(tokens, R), empty(tokens, R), cache, slots)
    latents, turned = empty(tokens, heads, L), q[..., 128:]
    if not known or FULL:
        triton.absorbed(latents, turned, cache, meta, 0.1)
    triton.chosen(latents, turned, cache, meta, 0.1, ints(tokens, TOP_K))
    if known:
        hopper.expanded(q, empty(heads, 256, L), cache, meta, 0.1, empty(tokens, heads, 128))


def gpu() -> AbsentGpu:
    """A Hopper GPU with dependent launches."""
    absent = AbsentGpu(check)
    absent.describe_to(triton_plan, triton, hopper)
    setattr(pdl, "in_use", lambda: True)  # noqa: B010
    return absent


def decodes() -> None:
    """Decodes of 128 heads, and of 16, then with drafts; with --full more, and on a small GPU."""
    absent = gpu()
    launch(64, 1, 128)
    launch(64, 1, 16)
    launch(128, 2, 16, few=2)
    for few in full_rows((1, 2)):
        launch(4 * few, few, 16, few)
        launch(128, few, 128, few)
    if FULL:
        absent.room = 99 << 10
        launch(64, 1, 16)


def prompts() -> None:
    """A prompt, expanded and with chosen tokens."""
    gpu()
    for heads in (128, *full_rows((16, 64))):
        launch(8192, 8192, heads)

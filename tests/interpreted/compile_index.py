"""Compiles sparse latent attention for sm_90 at the sizes of DeepSeek-V3.2 and GLM-5; prints each kernel."""

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, triton_plan
from quire.kernels.index import IndexView
from quire.kernels.index import triton as index
from quire.kernels.latent import LatentView
from quire.kernels.latent import triton as latent

from ..support.full import full_rows
from .compiling import AbsentGpu, Known, Made, name_of

TOP_K, SIZE = 2048, 64


def check(made: Made) -> None:
    """Next to nothing spills; scores and attention run on Hopper's tensor cores."""
    assert made.stack <= 16 * (made.name == "chosen_kernel"), (made.stack, made)
    if made.name in ("score_kernel", "chosen_kernel"):
        assert "wgmma" in made.ptx, made


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(
    heads: int,
    index_heads: int,
    tokens: int,
    prompts: bool,
    codes: torch.dtype | None = None,
    blocks: int = 2048,
    decodes: int = 0,
) -> None:
    """The kernels of a layer of a step with 16 decodes, or with a prompt. blocks: of the context

    decodes   before the prompt: attention to their tokens is not launched
    """
    ints, seqs = torch.int32, 1 + decodes if prompts else 16
    scales = None if codes is None else empty(99, 1, SIZE, 1, dtype=torch.float32)
    keys = IndexView(empty(99, 1, SIZE, 128, dtype=codes or torch.bfloat16), scales)
    cache = LatentView(empty(99, 1, SIZE, 512), empty(99, 1, SIZE, 64))
    slots, table = empty(tokens, dtype=torch.int64), empty(99, blocks, dtype=ints)
    sizes = empty(seqs + 1, dtype=ints), empty(seqs, dtype=ints)
    known = ((decodes, tokens, decodes, SIZE * blocks // 2),) if prompts else ()
    meta = AttentionMeta(*sizes, table, slots, empty(seqs, dtype=ints), tokens if prompts else 1, 1, None, known)
    turn = empty(tokens, 64), empty(tokens, 64)
    q, k = empty(tokens, index_heads, 128), empty(tokens, 128 + index_heads)[:, :128]
    for own in (q, q[:, :0]):  # without queries: a later pass of a drafter
        index.prepare(own, k, empty(2, 128), 1e-6, *turn, keys, slots)
    chosen = index.choose(q, empty(tokens, index_heads, dtype=torch.float32), keys, meta, TOP_K)
    rows, positions = tokens - decodes, chosen.positions[decodes:]
    latent.chosen(empty(rows, heads, 512), empty(rows, heads, 64), cache, meta, 0.1, positions, decodes)


def main() -> None:
    """Decodes with dependent launches, and prompts."""
    AbsentGpu(check).describe_to(triton_plan, latent)
    setattr(pdl, "in_use", lambda: True)  # noqa: B010
    launch(128, 64, 16, prompts=False, codes=torch.float8_e4m3fn)
    launch(64, 32, 300, prompts=True)
    launch(64, 32, 300, prompts=True, blocks=512)
    for prompts in full_rows((False, True)):
        for codes in (None, torch.float8_e4m3fn):
            for heads, index_heads in ((128, 64), (64, 32)):
                launch(heads, index_heads, 300 if prompts else 16, prompts, codes)


class Counted(AbsentGpu):
    """Compiles nothing, and counts the kernels that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def compile(self, src: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        self.names.append(name_of(src.fn))
        return Known()


def rows() -> None:
    """Prompts of other numbers of rows, behind other numbers of decodes."""
    gpu = Counted()
    gpu.describe_to(triton_plan, latent)
    launch(64, 32, 306, prompts=True, blocks=512, decodes=2)
    known = list(gpu.names)
    for tokens, decodes in ((303, 3), (300, 3), (320, 4)):
        launch(64, 32, tokens, prompts=True, blocks=512, decodes=decodes)
    assert gpu.names == known, gpu.names[len(known) :]
    print(*(f"compiled {name}" for name in known), sep="\n")

"""Compiles the kernels of steps, drafts and moved tokens for GPUs that are not there; prints each kernel."""

import torch

from quire.kernels.attention import KVView
from quire.kernels.blend import triton as blend
from quire.kernels.ngram import triton as ngram
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.kernels.step import triton as step
from quire.plan.graphs import decode_sizes

from ..support.full import full_rows
from .compiling import AbsentGpu


def compile_production() -> None:
    """Decode steps of one sequence, of the captured sizes, and steps with prompts; for 1 and 1,024 slots."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    packed = zeros(1 << 16, dtype=torch.int32)
    step.apply_runs(packed)
    for slots, block_size, length in ((1, 128, 4096), (1024, 16, 1000), *full_rows([(256, 128, 40960)])):
        tables = Tables(
            block_tables=zeros(2, slots + 1, length // block_size + 1, dtype=torch.int32),
            computed=zeros(slots + 1),
            history=zeros(slots + 1, length, dtype=torch.int32),
            hosted=zeros(slots + 1, dtype=torch.int32),
            block_sizes=(block_size, 2 * block_size),
        )
        buffers = StepBuffers(
            token_ids=zeros(8192),
            positions=zeros(8192),
            kv_slots=zeros(2, 8192),
            live=zeros(8192, dtype=torch.bool),
            seq_lens=zeros(slots, dtype=torch.int32),
            sample_rows=zeros(8192),
            sample_slots=zeros(8192),
            sample_positions=zeros(8192),
            drafts=zeros(8192, dtype=torch.int32),
        )
        words = StepWords.view(packed, slots)
        sizes = decode_sizes(slots)
        for size in (sizes[-1], *full_rows(sizes)):
            for query in (1, 4):
                step.build_inputs(words, tables, buffers.cut(query * size, size, query * size))
        for tokens in (8192, *full_rows((256, 1000))):
            step.build_inputs(words, tables, buffers.cut(tokens, slots, slots))
        step.finish_step(
            words, tables, buffers, zeros(8192), zeros(8192, dtype=torch.uint8), zeros(3, slots, dtype=torch.int32)
        )
        for behind in (False, True):
            kept = zeros(slots + 1, 16, 4096, dtype=torch.bfloat16)
            step.keep_states(words, buffers, zeros(8192, 4096, dtype=torch.bfloat16), kept, tables.computed, behind)
        ngram.propose(words, tables, 5, 5)


def compile_moves() -> None:
    """Keys and values of 8B models, and latents in 8 bits; with --full both in a cache of each kind."""
    slots, turn = torch.zeros(300, dtype=torch.int64), torch.zeros(300, 128)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        dense = KVView(*(torch.zeros(4, 3, 8, 128, 128).to(dtype)[:, at] for at in (0, 1)))
        latent = KVView(torch.zeros(4, 1, 128, 64).to(dtype), torch.zeros(4, 1, 128, 512).to(dtype))
        coded = dtype != torch.bfloat16
        for kv in (latent if coded else dense, *full_rows([dense if coded else latent])):
            half = turn[:, : kv.k.shape[3]].contiguous()
            blend.move(kv, slots, slots, half, half)
            blend.deviation(kv, slots, slots, half, half)


def main() -> None:
    """Hopper; with --full also Ampere, which has no 8-bit floating-point numbers."""
    gpu = AbsentGpu(room=163 << 10)  # of sm_80
    compile_production()
    compile_moves()
    for gpu.capability in full_rows([80]):
        compile_production()

"""Cases of unquantized operations: norms, activations, heads, projections, attention, and the work around a step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from quire.contracts.step import SAMPLE, SharedPrefix, StepPlan
from quire.kernels.attention import AttentionMeta, KVView, SharedBlocks
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.cases import EPS, LOGIT_ROWS, KernelCase, KernelSetup, Pair, Result, made
from quire.kernels.step import StepBuffers, Tables
from quire.kernels.step import triton as step
from quire.kernels.step.packed import PackedUpload
from quire.kernels.step.upload import Change


def norm_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of the RMS norm of hidden states."""
    dim = setup.args.hidden_size

    def pair(rows: int) -> Pair:
        x, weight = setup.randn(rows, dim), setup.randn(dim)
        return Pair(lambda: setup.kernels.norm.rms_norm(x, weight, EPS), lambda: F.rms_norm(x, (dim,), weight, EPS))

    for rows in setup.rows:
        yield KernelCase(
            shape=f"{rows} x {dim}",
            num_bytes=(2 * rows + 1) * dim * setup.item,
            flops=4 * rows * dim,
            baseline="F.rms_norm",
            make=made(pair, rows),
        )


def activation_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of silu(gate) * up."""
    size = setup.inner

    def pair(rows: int) -> Pair:
        x = setup.randn(rows, 2 * size)
        return Pair(lambda: setup.kernels.activation.gated(x), lambda: F.silu(x[:, :size]) * x[:, size:])

    for rows in setup.rows:
        yield KernelCase(
            shape=f"{rows} x {size}",
            num_bytes=3 * rows * size * setup.item,
            flops=4 * rows * size,
            baseline="F.silu, mul",
            make=made(pair, rows),
        )


def heads_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of the kernel before attention: norm and rotary embedding of query and key heads, and KV cache write.

    The written cache is compared, too.
    """
    args, size = setup.attention, setup.block_size
    heads, kv_heads, dim = args.num_heads, args.num_kv_heads, args.head_dim
    turned = heads + kv_heads

    def pairs(rows: int, count: int) -> list[Pair]:
        blocks = -(-rows // size) + 1
        slots = torch.randperm((blocks - 1) * size, device=setup.device)[:rows] + size
        weight = setup.randn(turned, dim) if args.qk_norm else None
        cos, half = setup.randn(rows, dim // 2).repeat(1, 2), setup.randn(rows, dim // 2)
        sin = torch.cat((-half, half), 1)

        def pair(kv: KVView, other: KVView) -> Pair:
            qkv = setup.randn(rows, turned + kv_heads, dim)
            for part in (kv.k, kv.v, other.k, other.v):
                part.zero_()  # so that the error depends only on what was written

            def library() -> Result:
                x = qkv[:, :turned]
                if weight is not None:
                    x = F.rms_norm(x, (dim,), None, EPS) * weight
                x = x * cos[:, None] + x.roll(dim // 2, -1) * sin[:, None]
                other.k[slots // size, :, slots % size] = x[:, heads:]
                other.v[slots // size, :, slots % size] = qkv[:, turned:]
                return x[:, :heads], other.k, other.v

            prepare = setup.kernels.heads.prepare
            return Pair(lambda: (prepare(qkv, weight, EPS, cos, sin, kv, slots), kv.k, kv.v), library)

        views = setup.arena(2 * count, blocks)
        return list(map(pair, views[::2], views[1::2]))

    for rows in setup.rows:
        moved = rows * dim * (2 * (turned + kv_heads) + 2) * setup.item + 8 * rows
        yield KernelCase(
            shape=f"{rows} x {heads}+{kv_heads}x{dim}",
            num_bytes=moved,
            flops=10 * rows * turned * dim,
            baseline="PyTorch, 10 calls",
            make=partial(pairs, rows),
        )


def linear_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of all projections of a layer, and of the LM head."""
    kernel, shapes = setup.kernels.linear, setup.projections

    def pair(name: str, rows: int) -> Pair:
        n, k = shapes[name]
        x, weight = setup.randn(rows, k), setup.randn(n, k, scale=k**-0.5)
        packed = kernel.pack(weight.clone())
        run = kernel.run_float if name == "head" else kernel.run
        return Pair(lambda: run(x, packed, None), lambda: F.linear(x, weight))

    for name, (n, k) in shapes.items():
        for rows in setup.rows:
            if name == "head" and rows > LOGIT_ROWS:
                continue
            out = 4 if name == "head" else setup.item
            yield KernelCase(
                shape=f"{name} {rows} x {k} -> {n}",
                num_bytes=(n * k + rows * k) * setup.item + rows * n * out,
                flops=2 * rows * n * k,
                baseline="F.linear",
                make=made(pair, name, rows),
            )


def attention_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield attention cases: decodes, prompts, a chunk of a long prompt. Baseline: SDPA on an unpaged KV cache."""
    return (_attention_case(setup, sizes, 0) for sizes in setup.steps)


def shared_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield decode cases with a shared prefix. The baseline is the same kernel without shared reads."""
    return (
        _attention_case(setup, (seqs, 1, context), prefix // setup.block_size) for seqs, context, prefix in setup.shared
    )


def _attention_case(setup: KernelSetup, sizes: tuple[int, int, int], front: int) -> KernelCase:
    """Make an attention case. `sizes`: sequences, new tokens of each, context of each; `front`: shared blocks."""
    (seqs, new, context), size, device = sizes, setup.block_size, setup.device
    heads, kv_heads, dim = setup.attention.num_heads, setup.attention.num_kv_heads, setup.attention.head_dim

    def pairs(count: int) -> list[Pair]:
        own = -(-context // size) - front
        i32: Any = {"dtype": torch.int32, "device": device}
        blocks = torch.randperm(front + seqs * own, **i32).add_(1)
        slots = np.arange(seqs, dtype=np.int32)
        packed = pack_shared([SharedPrefix(slots, front)], slots, np.ones_like(slots), num_groups=1, most_seqs=seqs)
        meta = AttentionMeta(
            query_start=torch.arange(0, seqs * new + 1, new, **i32),
            seq_lens=torch.full((seqs,), context, **i32),
            block_tables=torch.cat((blocks[:front].expand(seqs, front), blocks[front:].view(seqs, own)), 1),
            kv_slots=torch.zeros(seqs * new, dtype=torch.int64, device=device),
            table_rows=torch.arange(seqs, **i32),
            max_query_len=new,
            shared=SharedBlocks.view(torch.from_numpy(packed).to(device), 1, seqs, seqs) if front else None,
        )
        return [_attention_pair(setup, kv, meta, sizes) for kv in setup.arena(count, len(blocks) + 1)]

    seen = new * context - new * (new - 1) // 2  # positions that the rows of one sequence attend to
    read = seqs * context - (seqs - 1) * front * size
    alike = f", {front * size} shared" if front else ""
    return KernelCase(
        shape=f"{seqs} x {new} of {context}{alike}, {heads}/{kv_heads}x{dim}",
        num_bytes=2 * (kv_heads * read + heads * seqs * new) * dim * setup.item,
        flops=4 * seqs * heads * dim * seen,
        baseline="not shared" if front else "SDPA, unpaged",
        make=pairs,
    )


def _attention_pair(setup: KernelSetup, kv: KVView, meta: AttentionMeta, sizes: tuple[int, int, int]) -> Pair:
    seqs, new, context = sizes
    heads, kv_heads, dim = setup.attention.num_heads, setup.attention.num_kv_heads, setup.attention.head_dim
    q, attend = setup.randn(seqs * new, heads, dim), setup.kernels.attention.paged_attention
    k, v = (
        part[meta.block_tables.long()].transpose(1, 2).reshape(seqs, kv_heads, -1, dim)[:, :, :context].contiguous()
        for part in (kv.k, kv.v)
    )
    rows = q.view(seqs, new, heads, dim).transpose(1, 2)
    mask = causal_lower_right(new, context) if 1 < new < context else None

    def library() -> Tensor:
        out = F.scaled_dot_product_attention(rows, k, v, mask, is_causal=new == context > 1, enable_gqa=True)
        return out.transpose(1, 2).reshape(seqs * new, heads, dim)

    run, alone = (partial(attend, q, kv, one, dim**-0.5) for one in (meta, replace(meta, shared=None, plans={})))
    return Pair(run, library if meta.shared is None else alone, library)


def step_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of the work around a forward pass: update block tables, build inputs, store sampled tokens."""
    for seqs, new, context in setup.steps:
        yield KernelCase(
            shape=f"{seqs} x {new} of {context}",
            num_bytes=28 * seqs * new + 200 * seqs,
            make=made(_step_pair, setup, seqs, new, context),
        )


def _step_pair(setup: KernelSetup, seqs: int, new: int, context: int) -> Pair:
    size, tokens, device = setup.block_size, seqs * new, setup.device

    def some(*shape: int) -> Tensor:
        return torch.randint(1, 1000, shape, device=device)

    tables = Tables(
        block_tables=some(1, seqs + 1, -(-context // size)).int(),
        computed=some(seqs + 1),
        history=some(seqs + 1, context + 1).int(),
        hosted=some(seqs + 1).int(),
        block_sizes=(size,),
    )
    buffers = StepBuffers(
        token_ids=some(tokens),
        positions=some(tokens),
        kv_slots=some(1, tokens),
        live=some(tokens).bool(),
        seq_lens=some(seqs).int(),
        sample_rows=some(seqs),
        sample_slots=some(seqs),
        sample_positions=some(seqs),
        drafts=some(seqs).int(),
    )
    drawn, codes, out = some(seqs), torch.zeros(seqs, dtype=torch.uint8, device=device), some(3, seqs).int()
    upload, ones = PackedUpload(seqs, seqs, device, 0, words=1 << 14), np.ones(seqs, np.int32)
    plan = StepPlan(
        step=0,
        slots=np.arange(seqs, dtype=np.int32),
        num_tokens=new * ones,
        num_rows=ones,
        num_decodes=seqs if new == 1 else 0,
        outputs=np.full(seqs, SAMPLE, np.uint8),
    )
    before, width = np.array([context - new], np.int64).view(np.int32), tables.block_tables.shape[2]
    upload.send(
        plan,
        [
            change
            for seq in range(seqs)
            for change in (
                Change(tables.computed, 2 * seq, before),
                Change(tables.block_tables, (seq + 1) * width - 1, 7 * ones[:1]),
            )
        ],
    )

    def run() -> Result:
        upload.apply()
        step.build_inputs(upload.step, tables, buffers)
        step.finish_step(upload.step, tables, buffers, drawn, codes, out)
        made = list(vars(buffers).values())[:-1]  # no step here has drafts
        return *made, tables.computed[:seqs], tables.history[:seqs, context], out[:2]

    def expected() -> Result:
        seq = torch.arange(seqs, device=device)
        row, at = seq.repeat_interleave(new), torch.arange(context - new, context, device=device).repeat(seqs)
        block, whole = tables.block_tables[0].long(), torch.full_like(seq, context)
        block[:, -1] = 7
        kv_slots = block[row, at // size] * size + at % size
        live = torch.ones_like(row, dtype=torch.bool)
        return (
            tables.history[row, at],
            at,
            kv_slots[None],
            live,
            whole,
            seq * new + new - 1,
            seq,
            whole,
            whole,
            drawn,
            torch.stack((drawn, codes)),
        )

    return Pair(run, None, expected)

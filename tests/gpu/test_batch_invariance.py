"""`--batch-invariant` on a GPU: rows have the same bits whatever tiles compute them, and texts in every engine.

The interpreter cannot show what these tests are for: instructions with other numbers of rows add in the same order.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.kernels.attention import AttentionMeta, KVView, as_list, inputs, ref
from quire.kernels.attention.inputs import Case
from quire.kernels.invariant import attention, experts, heads, linear
from quire.kernels.norm import triton as norm

from ..e2e.test_batch_invariance import PARAMS, bits_of, twice
from ..support.full import FULL
from ..support.tiny_models import Tiny, make_oracle, mixed_prompts

ROWS = (1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 300, 1000, 1024, 1100)
SHAPES = ((6144, 4096), (4096, 4096), (4096, 12288), (1000, 1032), (520, 72))  # outputs and inputs of weights


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bits of a row with any number of rows, at any place among them; and the numbers are right."""
    n, k = shape
    x, weight, bias = numbers(1100, k, dtype=dtype), numbers(n, k, seed=1, dtype=dtype) / k**0.5, numbers(n, seed=2)
    residual, bias = numbers(1100, n, seed=3, dtype=dtype), bias.to(dtype)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "run": lambda x, r: linear.run(x, weight, bias),
        "float": lambda x, r: linear.run_float(x, weight, None),
        "add": lambda x, r: linear.run_add(x, weight, None, r.clone()),
        "gated": lambda x, r: linear.run_gated(x, weight, bias),
    }
    exact = x.double() @ weight.double().T
    gate, up = (exact + bias.double()).chunk(2, 1)
    expected = {
        "run": exact + bias.double(),
        "float": exact,
        "add": exact + residual.double(),
        "gated": gate * gate.sigmoid() * up,
    }
    for name, way in ways.items():
        whole = way(x, residual)
        error = ((whole.double() - expected[name]).abs() / (1 + expected[name].abs())).max().item()
        assert error < {torch.bfloat16: 0.025, torch.float16: 0.004, torch.float32: 1e-4}[dtype], (name, error)
        for rows in ROWS:
            for first in {0, 1100 - rows, min(37, 1100 - rows)}:
                some = way(x[first : first + rows], residual[first : first + rows])
                assert torch.equal(some, whole[first : first + rows]), (name, rows, first)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def chunked(q: Tensor, kv: KVView, meta: AttentionMeta, chunks: list[tuple[int, int, int]], **more: Any) -> Tensor:
    """The attention of chunks (sequence, tokens before, tokens); NaN for other rows."""
    starts = as_list(meta.query_start)
    rows = torch.cat([torch.arange(starts[s] + first, starts[s] + first + count) for s, first, count in chunks]).cuda()
    step = AttentionMeta(
        query_start=ints(np.cumsum([0, *(count for *_, count in chunks)]).tolist()),
        seq_lens=ints([first + count for _, first, count in chunks]),
        block_tables=meta.block_tables,
        kv_slots=meta.kv_slots,
        table_rows=ints([s for s, *_ in chunks]),
        max_query_len=max(count for *_, count in chunks),
        decode_len=more.pop("decode_len", 1),
    )
    found = torch.full_like(q, torch.nan)
    found[rows] = attention.paged_attention(q[rows], kv, step, 0.1, **more)
    return found


@pytest.mark.parametrize("more", [{}, {"window": 300}, {"window": -512}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((8, 1), 64), ((4, 4), 256), ((8, 2), 80)])
def test_attention(heads: tuple[int, int], dim: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks, decodes that are divided or not, drafts: the same bits, and the numbers are right."""
    case = Case((3000, 700), (3000, 700), heads=heads, head_dim=dim, block_size=128)
    q, kv, meta = inputs.make(case, torch.bfloat16)
    expected = ref.paged_attention(q.float(), KVView(kv.k.float(), kv.v.float()), meta, 0.1, **more)
    q, kv = q.cuda(), KVView(kv.k.cuda(), kv.v.cuda())
    meta.block_tables = meta.block_tables.where(meta.block_tables < len(kv.k), 0).cuda()  # unread entries are huge
    whole = chunked(q, kv, meta, [(0, 0, 3000), (1, 0, 700)], **more)
    torch.testing.assert_close(whole.cpu().float(), expected, rtol=0, atol=0.03)
    random = np.random.default_rng(0)
    for seed in range(60 if FULL else 12):
        chunks = []
        for s, length in ((0, 3000), (1, 700))[:: random.choice([1, -1])]:
            first = int(random.integers(length))
            chunks.append((s, first, 1 if seed % 3 == 0 else 1 + int(random.integers(length - first))))
        monkeypatch.setattr(attention, "SCRATCH", (64 << 20) * (seed % 2))
        found = chunked(q, kv, meta, chunks[: 1 + seed % 2], decode_len=1 + 3 * (seed % 4 == 1), **more)
        there = ~found.isnan().any(-1).any(-1)
        assert int(there.sum()) == sum(count for *_, count in chunks[: 1 + seed % 2])
        assert torch.equal(found[there], whole[there]), chunks


def test_norms_heads_and_experts() -> None:
    """Rows of the other kernels in steps of few and many rows."""
    x, ones = numbers(900, 4096), numbers(4096, seed=1)
    normed = norm.rms_norm(x, ones, 1e-6)
    qkv, sides = numbers(900, 48, 128), numbers(40, 128, seed=2)
    angle = numbers(900, 128, seed=3)
    page = torch.zeros(8, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(900, device="cuda")
    turned = heads.prepare(qkv, sides, 1e-6, angle, angle, KVView(page, page.clone()), slots)
    gate_up, down = numbers(16, 512, 1024, seed=4) * 0.03, numbers(16, 1024, 256, seed=5) * 0.06
    packed = experts.empty(16, gate_up[0], down[0], torch.device("cuda"))
    for place in range(16):
        experts.put(packed, place, gate_up[place], down[place])
    given, ids = numbers(900, 1024, seed=6), numbers(900, 16, seed=7).topk(4).indices.int()
    weights = numbers(900, 4, seed=8).float().sigmoid()
    summed = experts.run(given, weights, ids, packed)
    for rows in (1, 3, 64, 300):
        for first in (0, 900 - rows):
            some = slice(first, first + rows)
            assert torch.equal(norm.rms_norm(x[some], ones, 1e-6), normed[some])
            kept = KVView(page, page.clone())
            found = heads.prepare(qkv[some], sides, 1e-6, angle[some], angle[some], kept, slots[some])
            assert torch.equal(found, turned[some])
            assert torch.equal(experts.run(given[some], weights[some], ids[some], packed), summed[some]), rows


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 16},
    "eager": {"enforce_eager": True, "async_depth": 1, "max_num_seqs": 4},
    "preempted": {"max_num_batched_tokens": 64, "block_size": 16, "num_gpu_blocks_override": 18},
    "drafting": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "glm4_moe"])
def test_engines(family: str, tmp_path: Path) -> None:
    """Logits of a text in engines of other sizes, captured or not, preempted, with drafts, cached and computed."""
    prompts, known = mixed_prompts(), dict[tuple[int, ...], bytes]()
    folder = make_oracle(Tiny(family=family), prompts, lambda name: tmp_path / name).folder
    for name, options in ENGINES.items():
        more = {} if "num_gpu_blocks_override" in options else {"kv_cache_memory_bytes": 1 << 26}
        with LLM(
            str(folder),
            device="cuda",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            batch_invariant=True,
            **more,
            **options,
        ) as llm:
            for text, bits in bits_of(llm, twice(prompts), PARAMS):
                assert known.setdefault(text, bits) == bits, (name, len(text))


def test_random_schedules() -> None:
    """1,000 random batches in the full run: prompts of one engine come in any number and order, cached or not."""
    known: dict[tuple[int, ...], bytes] = {}
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 900, int(n)).tolist() for n in random.integers(1, 600, 24)]
    with LLM(
        str(bundled_model()),
        device="cuda",
        dtype="bfloat16",
        kv_cache_memory_bytes=1 << 28,
        max_num_batched_tokens=256,
        use_tqdm_on_load=False,
        batch_invariant=True,
    ) as llm:
        for _ in range(1000 if FULL else 40):
            some = random.permutation(24)[: 1 + int(random.integers(24))]
            params = SamplingParams(max_tokens=int(random.integers(1, 9)), temperature=0.0, ignore_eos=True)
            for text, bits in bits_of(llm, [[prompts[i] for i in some]], params):
                assert known.setdefault(text, bits) == bits, len(text)
            if random.random() < 0.3:
                llm.reset_prefix_cache()

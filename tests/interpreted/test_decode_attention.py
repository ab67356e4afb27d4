"""Decodes from the projection on in one kernel, in Triton's interpreter, beside the two kernels that it replaces."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels import triton_runtime
from quire.kernels.attention import KVView
from quire.kernels.attention.inputs import Case
from quire.kernels.select import select_kernels
from quire.layers.attention import Attention
from quire.layers.context import Build, StepContext
from quire.layers.decoder import Decoder, DecoderBlock
from quire.layers.stack import first_of_each_kind
from quire.plan.kinds.blocks import operations
from quire.plan.layout import layout
from quire.plan.linears import linear_plans

from ..support.decodes import decode_step
from ..support.filled_models import fill, normal
from ..support.launches import launches
from ..support.tiny_models import Tiny, tiny_config

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.attention import triton
from quire.kernels.heads import triton as heads
from quire.kernels.joined import decode_attention
from quire.kernels.joined.choice import JoinedDecodes

ONE = Case((1,), (1,), heads=(4, 2), head_dim=64, block_size=64)
SHORT = Case((1,) * 3, (64, 65, 3), heads=(4, 2), head_dim=64, block_size=64, deal="runs")
ODD = Case((1, 1), (700, 33), heads=(6, 2), head_dim=128, block_size=48)
LONG = Case((1, 1), (2600, 130), heads=(8, 1), head_dim=64, block_size=128)
DRAFTED = Case((3, 1, 4), (66, 9, 700), heads=(6, 2), head_dim=64, block_size=64)  # across parts, and alone in one


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("case", "dtype", "normed", "window", "soft_cap", "sunk"),
    [
        (ONE, torch.float32, True, None, None, False),
        (SHORT, torch.bfloat16, True, None, None, True),
        (ODD, torch.float32, False, 70, 3.0, True),
        (LONG, torch.float32, True, None, None, True),
        (LONG, torch.float16, True, -1024, None, False),
        (DRAFTED, torch.float32, True, None, None, True),
        (DRAFTED, torch.float32, False, 2, None, False),
    ],
)
def test_as_the_two_kernels(
    case: Case, dtype: torch.dtype, normed: bool, window: int | None, soft_cap: float | None, sunk: bool
) -> None:
    """The cache is the same, and attention to the rounding of sums. Steps do not depend on those before."""
    qkv, given, kv, meta = decode_step(case, dtype, normed=normed)
    sinks = torch.linspace(-2, 6, case.heads[0]) if sunk else None
    own = KVView(kv.k.clone(), kv.v.clone())
    q = heads.prepare(qkv, given.norm, given.eps, given.cos, given.sin, kv, meta.kv_slots)
    expected = triton.paged_attention(q, kv, meta, 0.2, window, soft_cap, sinks)
    assert decode_attention.fits(qkv, own, meta)
    for _ in range(2):  # counters are as before, and what the first left in the cache is not read
        actual = decode_attention.attention(qkv, given, own, meta, 0.2, window, soft_cap, sinks)
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        for written, wanted in ((own.k, kv.k), (own.v, kv.v)):  # sums of the norm have another order
            torch.testing.assert_close(written, wanted, rtol=8e-3, atol=1e-6, equal_nan=True)


def made_block(**changes: int) -> DecoderBlock:
    """Return a dense layer of a random model in bfloat16, with the kernels of a GPU."""
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")) | {"head_dim": 64} | changes)
    kernels = select_kernels("cuda", "bfloat16", ops=operations(args), head_dim=64)
    params = layout(args)
    named = {param.name: param for param in params}
    kernels = replace(
        kernels,
        joined={f"layers.{i}.attention": JoinedDecodes(0, "", range(2, 17), "") for i in range(args.num_layers)},
    )
    build = Build(torch.bfloat16, torch.device("cpu"), kernels, named, linear_plans(args, params, kernels.choices))
    model = Decoder(args, params, build)
    fill(model, normal(0.1))
    assert first_of_each_kind(model.layers) == [0], "a warm-up would run all layers"
    return next(iter(model.layers))


def test_layer() -> None:
    """A layer gives the results of the separate kernels, with one launch less. Steps of a trace, and of fewer rows than
    the plan names or more than fit, take the separate kernels."""
    block = made_block()
    assert isinstance(block.attention, Attention) and block.attention.joined is not None
    heads = block.attention.num_heads, block.attention.num_kv_heads
    _, given, kv, meta = decode_step(
        Case((1, 1), (70, 9), heads=heads, head_dim=64, block_size=64), torch.bfloat16, normed=True
    )
    x = torch.randn(2, block.attention.qkv.in_features).bfloat16()
    found, counts = [], []
    for apart in (True, False):
        own = KVView(kv.k.clone(), kv.v.clone())
        ctx = StepContext(torch.tensor([69, 8]), (replace(meta, plans={}),), [own], apart=apart)
        with torch.inference_mode(), launches() as made:
            found.append(block(x.clone(), [(given.cos, given.sin)], ctx, own))
        counts.append(made.total())
    assert made["_headed_kernel"] == 1 and counts[0] - counts[1] == 1, (counts, made)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2 * float(found[0].float().abs().max()))
    block.attention.joined = JoinedDecodes(0, "", range(3, 17), "")
    with torch.inference_mode(), launches() as made:
        block(x.clone(), [(given.cos, given.sin)], replace(ctx, attention=(replace(meta, plans={}),)), own)
    assert "_headed_kernel" not in made and made.total() == counts[0]
    qkv = torch.zeros(17, heads[0] + 2 * heads[1], 64).bfloat16()
    assert not decode_attention.fits(qkv, kv, meta)
    assert decode_attention.fits(qkv[:2], kv, replace(meta, max_query_len=2, decode_len=2))
    assert not decode_attention.fits(qkv[:2], kv, replace(meta, max_query_len=2, decode_len=1))
    part = replace(meta, max_query_len=2, decode_len=2, prompts=((0, 1, 0, 63),))
    assert not decode_attention.fits(qkv[:2], kv, part), "another sequence may read the block that a prompt fills"

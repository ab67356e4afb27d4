"""A KV cache of 8-bit codes on a GPU: attention, latents and the writing of heads, against the truth on the CPU; and an
engine with such a cache beside one without."""

from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.kernels.attention import AttentionMeta, KVView, hopper, inputs, triton
from quire.kernels.attention.inputs import Case
from quire.kernels.attention.triton_widen import Pages
from quire.kernels.heads import inputs as heads_inputs
from quire.kernels.heads import ref as heads_ref
from quire.kernels.heads import triton as heads
from quire.kernels.latent import LatentView
from quire.kernels.latent import triton as latent
from quire.kernels.latent.inputs import make, steps
from quire.kernels.triton_runtime import missing_hopper

from ..support import eight_bit_truth as truth
from ..support.eight_bit_truth import DTYPES, K_SCALE, V_SCALE, near, written

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with 8-bit numbers", allow_module_level=True)

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-3}
TYPES = [torch.bfloat16, torch.float16]
Moved = TypeVar("Moved", KVView, LatentView, AttentionMeta)


def there(value: Moved) -> Moved:
    """A dataclass with its tensors on the GPU."""
    changes: dict[str, Any] = {name: one.to(DEVICE) for name, one in vars(value).items() if isinstance(one, Tensor)}
    return replace(value, **changes)


def step_there(meta: AttentionMeta) -> AttentionMeta:
    """The step with the bounds that a GPU's worker knows."""
    assert isinstance(meta.query_start, Tensor)
    longest = int(meta.query_start.diff().max())
    given = replace(meta, max_query_len=longest, decode_len=longest if longest <= 8 else 1, plans={})
    return there(given)


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 1, 1), (63, 64, 130), heads=(4, 2), head_dim=64, block_size=64),
        Case((1,) * 33, tuple(range(100, 1000, 28)), heads=(32, 8), head_dim=128, block_size=128),
        Case((700, 1), (1300, 90), heads=(8, 2), head_dim=128, block_size=128),
        Case((70, 1), (130, 90), heads=(4, 2), head_dim=32, block_size=48),
        Case((100, 1), (5000, 90), heads=(8, 2), head_dim=128, block_size=128),
    ],
    ids=str,
)
def test_attention(case: Case, dtype: torch.dtype, cache: torch.dtype) -> None:
    q, kv, meta = inputs.make(case, dtype)
    kv = truth.coded(kv, cache)
    expected = truth.attention(q, kv, meta, 0.1, None, None)
    found = triton.paged_attention(q.to(DEVICE), there(kv), step_there(meta), 0.1)
    near(found.cpu(), expected, TOLERANCE[dtype])


@pytest.mark.skipif(bool(missing_hopper()), reason=missing_hopper() or "has Hopper's kernels")
@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(
    "case",
    [
        Case((700, 1), (1300, 90), heads=(32, 8), head_dim=128, block_size=128),
        Case((1, 300, 1, 500), (90, 300, 700, 1111), heads=(32, 8), head_dim=64, block_size=64),
        Case((600, 1), (4000, 90), heads=(32, 8), head_dim=128, block_size=128),  # long enough to be divided
        Case((700, 1), (1300, 90), heads=(32, 8), head_dim=256, block_size=128),
        Case((300, 1), (800, 90), heads=(32, 4), head_dim=512, block_size=64),
    ],
    ids=str,
)
def test_prompts_on_hopper(
    case: Case, window: int | None, dtype: torch.dtype, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel reads the scratch: the truth of the codes, and the bits of an unquantized cache of the same values.

    Scales are powers of two, so that this cache is exact. Values past the end are large: a GPU's cache is finite. Keys
    of copied pages are not divided among programs, so those of the unquantized cache must not be, either.
    """
    q, kv, meta = inputs.make(case, dtype)
    kv.v.nan_to_num_(nan=90.0)
    kv = replace(truth.coded(kv, cache), k_scale=0.5, v_scale=2.0)
    k, v = (
        truth.values(side, scale).to(dtype).nan_to_num() for side, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
    )
    plain = KVView(k, v)
    given = step_there(meta)
    found = hopper.paged_attention(q.to(DEVICE), there(kv), given, 0.1, window)
    assert any(isinstance(one, Pages) for one in given.plans.values())
    monkeypatch.setattr(hopper._Call, "_divides", lambda call, config: False)
    same = hopper.paged_attention(q.to(DEVICE), there(plain), step_there(meta), 0.1, window)
    rows = torch.repeat_interleave(torch.tensor(case.query_lens) > 1, torch.tensor(case.query_lens))
    assert torch.equal(found[rows.to(DEVICE)], same[rows.to(DEVICE)])
    near(found.cpu(), truth.attention(q, kv, meta, 0.1, window), TOLERANCE[dtype])


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_latents(dtype: torch.dtype, cache: torch.dtype) -> None:
    for case in steps(
        Case((1, 1, 1), (70, 90, 40), heads=(6, 1), block_size=32), Case((20, 1), (70, 33), heads=(3, 1), block_size=16)
    ):
        q_latent, q_rope, kept, meta = make(case, 8, dtype)
        kept = truth.coded_latents(kept, cache)
        expected = truth.absorbed(q_latent, q_rope, kept, meta, 0.1)
        found = latent.absorbed(q_latent.to(DEVICE), q_rope.to(DEVICE), there(kept), step_there(meta), 0.1)
        near(found.cpu(), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("case", heads_inputs.CASES[::2], ids=str)
def test_heads_write_codes(case: heads_inputs.Case, cache: torch.dtype) -> None:
    """The codes of the reference, but where rounding in another order crosses a border."""
    qkv, norm, cos, sin, kv, slots = heads_inputs.make(case, torch.float32)
    made, wanted = (
        KVView(torch.zeros_like(kv.k, dtype=cache), torch.zeros_like(kv.v, dtype=cache), K_SCALE, V_SCALE)
        for _ in range(2)
    )
    on_gpu, weight = there(made), None if norm is None else norm.to(DEVICE)
    heads.prepare(qkv.to(DEVICE), weight, 1e-6, cos.to(DEVICE), sin.to(DEVICE), on_gpu, slots.to(DEVICE))
    heads_ref.prepare(qkv, norm, 1e-6, cos, sin, wanted, slots)
    written(on_gpu.k.cpu(), wanted.k)
    written(on_gpu.v.cpu(), wanted.v)


def test_an_engine_with_such_a_cache_knows_what_it_learned() -> None:
    """The bundled model answers recall questions with an 8-bit cache as it does without."""
    notes = "Tomas lives in Mumbai.\nThe code of Tomas is 6423.\nThe code of Lakral is 5411.\nLakral likes tea.\n\n"
    prompts = [
        f"{notes}Question: {asked}\nAnswer:"
        for asked in ("What is the code of Tomas?", "What is the code of Lakral?", "Where does Tomas live?")
    ]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    found = []
    for cache in ("auto", "fp8"):
        with LLM(device="cuda", max_model_len=512, kv_cache_memory_bytes=64 << 20, kv_cache_dtype=cache) as llm:
            found.append([one.outputs[0].text for one in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]

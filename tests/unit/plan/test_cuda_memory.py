"""Sharing out a GPU's memory: the numbers add up, and every proposal in a refusal is taken at its word."""

import re
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from quire.config.engine import EngineConfig
from quire.contracts.blocks import KVComponent, StateComponent, StateGroup
from quire.contracts.errors import ConfigError
from quire.plan.cuda_memory import (
    MAX_BLOCKS,
    SPARE,
    DeviceMemory,
    check_sequences,
    check_weights,
    resolve_batch,
    resolve_cuda_memory,
)
from quire.plan.dtype import resolve_dtype
from quire.plan.kv_geometry import CUDA_BLOCK_SIZE, resolve_geometry
from quire.plan.memory import MemoryPlan
from quire.plan.state_memory import slots_limit, state_use

GIB = 1024**3
COMPONENTS = tuple(KVComponent(name, 8, 128, "bfloat16", 2) for name in ("k", "v"))
GEOMETRY = resolve_geometry(COMPONENTS, 36, None, CUDA_BLOCK_SIZE)
PAGE = GEOMETRY.page_bytes
H200 = DeviceMemory(total=140 * GIB, at_start=139 * GIB, free=121 * GIB, weights=16 * GIB, later=GIB, others=0)
SMALL = DeviceMemory(
    total=24 * GIB,
    at_start=23 * GIB,
    free=5 * GIB,
    weights=16 * GIB,
    later=GIB,
    others=0,
    per_seq=16 << 20,
    per_token=1 << 20,
)


def plan(memory: DeviceMemory = H200, *, dtype: str = "bfloat16", **options: object) -> MemoryPlan:
    return resolve_cuda_memory(
        GEOMETRY, EngineConfig.from_flat(**options), memory, context=40960, chunk=2048, dtype=dtype
    )


def refusal(memory: DeviceMemory, *, dtype: str = "bfloat16", **options: object) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(memory, dtype=dtype, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_page() -> None:
    assert (GEOMETRY.block_size, PAGE) == (128, 36 * 2 * 8 * 128 * 128 * 2)


def test_the_cache_takes_what_is_left_of_the_share() -> None:
    found = plan(gpu_memory_utilization=0.9)
    assert H200.working == 4 * GIB  # 1 context, 2 activations, 1 later
    room = int(0.9 * 140 * GIB) - 20 * GIB
    assert found.kv_bytes == (found.num_blocks + 1) * PAGE <= room < found.kv_bytes + PAGE
    assert found.max_model_len == 40960 and found.notes == ()
    assert str(found.budget) == (
        "140.0 GiB: weights 16.0, activations and graphs 4.0, KV cache 106.0, other processes "
        "0.0, free 14.0 (gpu_memory_utilization 0.9)"
    )
    assert plan(gpu_memory_utilization=0.5).num_blocks < found.num_blocks


def test_a_tiny_page_does_not_make_millions_of_blocks() -> None:
    tiny = resolve_geometry((KVComponent("k", 1, 16, "bfloat16", 2),), 1, None, CUDA_BLOCK_SIZE)
    found = resolve_cuda_memory(tiny, EngineConfig(), H200, context=128, chunk=64, dtype="bfloat16")
    assert found.num_blocks == MAX_BLOCKS


def test_states_take_their_part() -> None:
    """States of running requests are measured; checkpoints have a third of what is left, or what there is beside a
    given KV cache, and enough for 50 requests, if half of the memory that is left has room."""
    state = StateComponent("matrix", (32, 128, 128), "float32", 4)
    recurrent = structs.replace(GEOMETRY, states=(StateGroup(layers=tuple(range(24)), components=(state,)),))
    assert recurrent.state_bytes == 48 << 20

    def found(memory: DeviceMemory = H200, **options: object) -> MemoryPlan:
        config = EngineConfig.from_flat(max_num_seqs=50, **options)
        return resolve_cuda_memory(recurrent, config, memory, context=40960, chunk=2048, dtype="bfloat16")

    usual, room = found(), int(0.92 * 140 * GIB) - 20 * GIB
    assert usual.checkpoints == 8 * 50 and usual.kv_bytes <= room - 400 * (48 << 20) < usual.kv_bytes + PAGE
    assert "KV cache 90.0, states 21.1, other" in str(usual.budget) and "graphs 1.6" in str(usual.budget)
    small = found(replace(H200, free=40 * GIB))
    left = room - 81 * GIB
    assert 0 <= left // 3 - small.checkpoints * (48 << 20) < 48 << 20 and small.kv_bytes + PAGE > 2 * left // 3
    assert found(kv_cache_memory_bytes=60 << 20).checkpoints == 51
    tight = replace(H200, free=GIB + SPARE + (50 << 20) + 9 * PAGE)
    assert found(tight, kv_cache_memory_bytes=9 * PAGE).checkpoints == 1
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes asks for .* lower it to"):
        found(tight, kv_cache_memory_bytes=10 * PAGE)


def test_what_others_hold_is_left_to_them_and_said() -> None:
    crowded = replace(H200, at_start=79 * GIB, free=61 * GIB, others=60 * GIB)
    found = plan(crowded)
    assert crowded.working == 4 * GIB
    assert found.kv_bytes <= crowded.free - crowded.later - SPARE < found.kv_bytes + PAGE
    assert "other processes hold 60.00 GiB" in found.notes[0]
    unknown = replace(crowded, others=None)
    assert unknown.outside == 61 * GIB and unknown.working == 3 * GIB


def test_exact_sizes_skip_the_share_but_not_the_memory() -> None:
    assert plan(kv_cache_memory_bytes=10 * PAGE).num_blocks == 9
    found = plan(num_gpu_blocks_override=10)
    assert (found.num_blocks, found.max_model_len) == (10, 1280)
    assert "from 40960 to 1280" in found.notes[0]
    assert plan(kv_cache_memory_bytes=119 * GIB).kv_bytes > 0.92 * 140 * GIB - 20 * GIB
    assert "kv_cache_memory_bytes asks for 129.99 GiB" in refusal(H200, kv_cache_memory_bytes=130 * GIB)
    lower = int(re.search(r"lower it to (\d+)", refusal(H200, num_gpu_blocks_override=10**6)).group(1))  # type: ignore
    assert plan(num_gpu_blocks_override=lower).num_blocks == lower
    assert "a larger num_gpu_blocks_override" in refusal(H200, num_gpu_blocks_override=10, max_model_len=4096)


def test_an_unset_context_shrinks_with_a_notice() -> None:
    found = plan(replace(SMALL, free=6 * GIB))
    assert found.max_model_len == found.num_tokens < 40960
    assert "context shortened from 40960" in found.notes[0]


def test_a_context_that_does_not_fit_names_ways_that_do() -> None:
    memory = replace(SMALL, free=7 * GIB)
    text = refusal(memory, max_model_len=32768, max_num_batched_tokens=2048)
    assert "needs 4.52 GiB of KV cache beside 18.00 GiB" in text and "0.92 allows 22.08 GiB of 24.00 GiB" in text
    for flag, changes in (("--max-model-len", "max_model_len"), ("--gpu-memory-utilization", "gpu_memory_utilization")):
        value = float(re.search(rf"{flag} ([\d.]+)", text).group(1))  # type: ignore[union-attr]
        options: dict[str, object] = {"max_model_len": 32768} | {
            changes: int(value) if changes == "max_model_len" else value
        }
        assert plan(memory, **options).max_model_len == options["max_model_len"]
    # What a smaller batch saves is measured again by whoever follows the advice.
    seqs = int(re.search(r"--max-num-seqs (\d+)", text).group(1))  # type: ignore[union-attr]
    tokens = int(re.search(r"--max-num-batched-tokens (\d+)", text).group(1))  # type: ignore[union-attr]
    for saved in ((256 - seqs) * memory.per_seq, (2048 - tokens) * memory.per_token):
        assert plan(replace(memory, free=memory.free + saved), max_model_len=32768).max_model_len == 32768
    assert "--dtype" not in text and "or a smaller model." in text


def test_what_leaves_no_room_for_a_block_says_how_much_is_missing() -> None:
    text = refusal(replace(SMALL, free=GIB), gpu_memory_utilization=0.9)
    assert "the smallest KV cache, of a page and one for padding, needs 36 MiB beside 24.00 GiB of weights, act" in text
    assert "2.44 GiB are missing" in text and "--max-num-seqs 100" in text and "--gpu-memory" not in text
    assert "--dtype bfloat16" in refusal(replace(SMALL, free=GIB), dtype="float32")


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded() -> None:
    check_weights(16 * GIB, 24 * GIB, 23 * GIB, EngineConfig(), dtype="bfloat16")
    with pytest.raises(ConfigError) as refused:
        check_weights(30 * GIB, 24 * GIB, 23 * GIB, EngineConfig(), dtype="float32")
    assert "30.00 GiB in float32" in str(refused.value) and "8.17 GiB are missing" in str(refused.value)
    assert "Try --dtype bfloat16, or a smaller model, or a GPU with 33 GiB." in str(refused.value)


def test_the_model_s_context_is_the_bound() -> None:
    assert "--max-model-len 40960" in refusal(H200, max_model_len=50000)


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"cudagraph_capture_sizes": (4, 0)},
        {"max_cudagraph_capture_size": 0},
        {"cudagraph_capture_sizes": ("4",)},
        {"gpu_memory_utilization": True},
    ],
)
def test_values_that_can_never_work(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig.from_flat(**options)


def test_float16_stays_on_a_gpu() -> None:
    assert resolve_dtype("auto", "float16", False, "cuda").dtype == "float16"
    assert resolve_dtype("half", "bfloat16", False, "cuda").dtype == "float16"
    assert resolve_dtype("auto", "bfloat16", False, "cuda").dtype == "bfloat16"


def test_more_sequences_than_a_step_has_are_refused() -> None:
    check_sequences(EngineConfig.from_flat(max_num_seqs=4096))
    with pytest.raises(ConfigError, match="max_num_seqs=4097: a step on a GPU has at most 4096"):
        check_sequences(EngineConfig.from_flat(max_num_seqs=4097))


@pytest.mark.parametrize(
    "asked, gib, seqs, tokens, wide",
    [
        ({}, 24, 256, 8192, 8192),
        ({}, 80, 1024, 8192, 16384),
        ({"max_num_seqs": 300}, 80, 300, 8192, 16384),
        ({"max_num_batched_tokens": 512}, 80, 512, 512, 512),
        ({"max_num_seqs": 9000}, 80, 9000, 9000, 16384),
    ],
)
def test_what_a_gpu_decides_when_nobody_did(asked: dict[str, int], gib: int, seqs: int, tokens: int, wide: int) -> None:
    for wait, most in ((False, tokens), (True, wide)):
        batch = resolve_batch(EngineConfig.from_flat(**asked).scheduler, gib << 30, wait)
        assert (batch.max_num_seqs, batch.max_num_batched_tokens) == (seqs, most)
        batch = resolve_batch(
            EngineConfig.from_flat(**asked).scheduler, gib << 30, wait, slots_limit(gib << 30, None, 1 << 30)
        )
        assert batch.max_num_seqs == asked.get("max_num_seqs", gib // 8)


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("given", [{}, {"kv_cache_memory_bytes": 8 * GIB}], ids=["default", "given"])
def test_states_have_their_share_of_a_gpu(share: float, given: dict[str, Any]) -> None:
    """Eight requests with 64 MiB of states each, and one for padding, are in the measured memory already."""
    matrix = StateComponent("matrix", (16, 1 << 20), "float32", 4)
    geometry = structs.replace(GEOMETRY, states=(StateGroup(layers=(0,), components=(matrix,)),))
    config = EngineConfig.from_flat(max_num_seqs=8, state_memory_fraction=share, **given)
    found = resolve_cuda_memory(geometry, config, H200, context=1 << 20, chunk=64, dtype="", states=state_use(config))
    states = (9 + found.checkpoints) * geometry.state_bytes
    assert states / (states + found.kv_bytes) == pytest.approx(share, abs=0.02)
    assert found.checkpoints > 1 and found.budget is not None and found.budget.states == states


def test_slots_have_a_quarter_of_the_share_of_states() -> None:
    assert slots_limit(64 * GIB, None, GIB) == 8 and slots_limit(64 * GIB, 0.5, GIB) == 8
    assert slots_limit(64 * GIB, 0.25, GIB) == 4 and slots_limit(GIB, 0.1, GIB) == 1

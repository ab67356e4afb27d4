"""Plans are pure functions of facts: every branch, and the numbers in every refusal."""

from dataclasses import replace as replace_use

import pytest
from msgspec.structs import replace

from quire.config.engine import CacheConfig, ModelConfig
from quire.contracts.blocks import KVComponent, StateComponent, StateGroup
from quire.contracts.errors import ConfigError
from quire.plan.dtype import resolve_dtype
from quire.plan.kv_geometry import resolve_geometry
from quire.plan.memory import MemoryPlan, as_gib, resolve_memory, slot_bytes
from quire.plan.state_memory import StateUse

COMPONENTS = tuple(KVComponent(name, 2, 64, "bfloat16", 2) for name in ("k", "v"))
GEOMETRY = resolve_geometry(COMPONENTS, 8, None)
PAGE = 8 * 2 * (2 * 32 * 64 * 2)


def plan(free: int = 1 << 34, context: int = 4096, **options: int) -> MemoryPlan:
    model = ModelConfig(max_model_len=options.pop("max_model_len", None))
    num_seqs = options.pop("max_num_seqs", 4)
    return resolve_memory(
        GEOMETRY, model, CacheConfig(**options), context=context, chunk=256, max_num_seqs=num_seqs, free_bytes=free
    )


def test_the_page_is_every_component_of_every_layer() -> None:
    assert (GEOMETRY.block_size, GEOMETRY.page_bytes) == (32, PAGE)
    assert resolve_geometry(COMPONENTS, 8, 16).page_bytes == PAGE // 2


def test_the_default_is_what_all_slots_can_use_and_at_most_a_quarter() -> None:
    assert plan().num_blocks == 4 * 4096 // 32
    small = plan(free=400 * PAGE)
    assert small.num_blocks == 99  # and the reserved block
    assert small.kv_bytes == 100 * PAGE


def test_the_quarter_gives_way_to_a_context_that_was_asked_for() -> None:
    found = plan(max_model_len=4096, free=200 * PAGE)
    assert (found.num_blocks, found.max_model_len, found.notes) == (128, 4096, ())
    assert plan(free=200 * PAGE).max_model_len == 49 * 32


def test_an_unset_context_shrinks_with_a_notice() -> None:
    short = plan(num_gpu_blocks_override=10)
    assert (short.max_model_len, short.num_tokens) == (320, 320)
    assert "from 4096 to 320" in short.notes[0]
    assert plan().notes == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 5000}, ["5000", "4096"]),
        ({"max_model_len": 4096, "num_gpu_blocks_override": 10}, ["16.00 MiB", "1.25 MiB", "to 320", "raise num_gpu"]),
        ({"max_model_len": 4096, "kv_cache_memory_bytes": 11 * PAGE}, ["to 320", "raise kv_cache_memory_bytes"]),
        ({"max_model_len": 4096, "free": 44 * PAGE}, ["the 5.50 MiB of free memory", "to 1344, or end other programs"]),
        ({"kv_cache_memory_bytes": PAGE}, ["one block of 0.12 MiB"]),
        ({"kv_cache_memory_bytes": 10 * 10**12}, ["kv_cache_memory_bytes", "9313.2", "16.00 GiB", "lower kv_cache"]),
        ({"num_gpu_blocks_override": 10**9}, ["override", "122070.31 GiB", "16.00 GiB", "lower num_gpu"]),
        ({"max_num_seqs": 2_000_000}, ["max_num_seqs=2000000", "31.98 GiB", "16.00 GiB", "lower max_num_seqs"]),
        ({"max_num_seqs": 2_000_000, "num_gpu_blocks_override": 128}, ["lower max_num_seqs"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(options: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**options)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("requested", "stored", "units", "chosen"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
        ("auto", "float32", True, "float32"),
        ("auto", "float16", True, "bfloat16"),
        ("auto", "float16", False, "float32"),
        ("float", "bfloat16", True, "float32"),
        ("bfloat16", "float32", False, "bfloat16"),
    ],
)
def test_dtype(requested: str, stored: str, units: bool, chosen: str) -> None:
    assert resolve_dtype(requested, stored, units).dtype == chosen


def test_bfloat16_weights_stay_as_they_are_where_float32_is_faster() -> None:
    plan = resolve_dtype("auto", "bfloat16", False)
    assert plan.weights == "bfloat16" and "weights stay bfloat16" in plan.reason
    for others in (("auto", "bfloat16", True), ("auto", "float32", False), ("float32", "bfloat16", False)):
        assert not resolve_dtype(*others).weights
    assert not resolve_dtype("auto", "bfloat16", False, "cuda").weights


@pytest.mark.parametrize("requested", ["float16", "half"])
def test_float16_is_refused_on_a_cpu(requested: str) -> None:
    with pytest.raises(ConfigError, match="bfloat16 or dtype=float32"):
        resolve_dtype(requested, "float16", True)


def test_the_tables_of_a_slot_are_all_counted() -> None:
    import torch

    from quire.engine.table import RunningTable
    from quire.kernels.step.state import DeviceState, Limits

    num_slots, length = 64, 1024
    limits = Limits(num_slots=num_slots, max_tokens=0, max_model_len=length, block_sizes=(32,))
    state = DeviceState(limits, 100, torch.device("cpu"))
    parts = (state, state.tables, state.buffers, state.sampling, RunningTable(num_slots))
    held = [column for part in parts for column in vars(part).values()]
    used = sum(t.nbytes if hasattr(t, "nbytes") else 8 * len(t) for t in held if hasattr(t, "__len__"))
    assert used <= num_slots * slot_bytes(length, GEOMETRY) <= 1.1 * used


MATRIX = StateComponent("matrix", (16, 1 << 20), "float32", 4)
WITH_STATES = replace(GEOMETRY, states=(StateGroup(layers=(0,), components=(MATRIX,)),))


SMALL = StateComponent("matrix", (16, 1 << 10), "float32", 4)
SMALL_STATES = replace(GEOMETRY, states=(StateGroup(layers=(0,), components=(SMALL,)),))


def test_as_many_requests_run_as_have_room_for_their_states() -> None:
    """Of 1 GiB, half of what the KV cache leaves has room for 6 states of 64 MiB. Half of the rest has 3."""

    def sized(free: int, seqs: int) -> MemoryPlan:
        return resolve_memory(
            WITH_STATES, ModelConfig(), CacheConfig(), context=4096, chunk=64, max_num_seqs=seqs, free_bytes=free
        )

    found = sized(1 << 30, 8)
    assert (found.num_slots, found.checkpoints) == (6, 3)
    assert "6 requests run at once, not max_num_seqs=8: each has 64.00 MiB" in found.notes[-1]
    assert sized(1 << 32, 8).num_slots == 8
    assert "1 request runs at once, not max_num_seqs=8: each has" in sized(1 << 28, 8).notes[-1]
    for seqs in (1, 8):  # the slots were reduced to one, and max_num_seqs cannot be lowered
        with pytest.raises(
            ConfigError, match="^a running request needs .* of tables and states .*: lower max_model_len,"
        ):
            sized(1 << 26, seqs)


@pytest.mark.parametrize(
    ("count", "words"), [(512, "0.50 KiB"), (30 << 10, "30.00 KiB"), (1 << 20, "1.00 MiB"), (1 << 30, "1.00 GiB")]
)
def test_sizes_in_words(count: int, words: str) -> None:
    assert as_gib(count) == words


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("cache", [CacheConfig(), CacheConfig(kv_cache_memory_bytes=1 << 32)], ids=["default", "given"])
def test_states_have_their_share_of_the_memory(share: float, cache: CacheConfig) -> None:
    """States of 64 MiB: slots take at most half of the share, and checkpoints the rest, as far as memory goes."""
    free = 1 << 36
    found = resolve_memory(
        WITH_STATES,
        ModelConfig(),
        cache,
        context=1 << 20,
        chunk=64,
        max_num_seqs=4,
        free_bytes=free,
        states=StateUse(fraction=share),
    )
    states = (found.num_slots + 1 + found.checkpoints) * WITH_STATES.state_bytes
    assert states / (states + found.kv_bytes) == pytest.approx(share, abs=0.05)
    assert states + found.kv_bytes <= free and found.num_slots < found.checkpoints


def test_no_more_checkpoints_are_made_than_the_cache_has_places() -> None:
    few = CacheConfig(num_gpu_blocks_override=20)
    found = resolve_memory(
        WITH_STATES,
        ModelConfig(),
        few,
        context=256,
        chunk=64,
        max_num_seqs=4,
        free_bytes=1 << 38,
        states=StateUse(fraction=0.9999),
    )
    assert found.checkpoints <= 21


@pytest.mark.parametrize(
    ("use", "checkpoints"), [(StateUse(), 32), (StateUse(per_slot=1), 5), (StateUse(per_slot=0), 1)]
)
@pytest.mark.parametrize("fraction", [None, 0.9])
def test_no_more_checkpoints_are_made_than_something_takes(
    use: StateUse, checkpoints: int, fraction: float | None
) -> None:
    """With a share, states get more by default: a checkpoint for each of 64 places."""
    given, asked = CacheConfig(num_gpu_blocks_override=64), replace_use(use, fraction=fraction)
    found = resolve_memory(
        SMALL_STATES, ModelConfig(), given, context=256, chunk=64, max_num_seqs=4, free_bytes=1 << 42, states=asked
    )
    if fraction is not None and use.per_slot > 1:
        checkpoints = found.num_tokens // SMALL_STATES.hit_size + 1
    assert found.checkpoints == checkpoints


def test_a_small_cache_has_a_checkpoint_for_each_request_and_one_more() -> None:
    few = CacheConfig(num_gpu_blocks_override=3)
    for fraction in (None, 0.9999):
        use = StateUse(fraction=fraction)
        found = resolve_memory(
            WITH_STATES, ModelConfig(), few, context=64, chunk=8, max_num_seqs=9, free_bytes=1 << 38, states=use
        )
        assert (found.num_slots, found.checkpoints) == (9, 10)


def test_the_slot_of_padding_is_counted() -> None:
    """1 + 1 + 1 states of 64 MiB: padding, a slot, and a checkpoint."""
    cache = CacheConfig(num_gpu_blocks_override=3)
    page, state = WITH_STATES.page_bytes, WITH_STATES.state_bytes

    def sized(free: int) -> MemoryPlan:
        return resolve_memory(WITH_STATES, ModelConfig(), cache, context=64, chunk=8, max_num_seqs=1, free_bytes=free)

    with pytest.raises(ConfigError, match="a running request needs .* of tables and states"):
        sized(4 * page + state + (1 << 20))
    assert sized(4 * page + 3 * state + (1 << 20)).checkpoints == 1

"""Tiers below the device are divided between KV blocks and checkpoints as the device is."""

import re

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.plan.memory import GIB, shared_sizes
from quire.plan.sizing import resolve_sizing, rounded_up
from quire.plan.state_memory import divide_tier

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config

ARGS = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_5_text")))


def test_a_tier_has_the_parts_of_the_device() -> None:
    plan = planned(ARGS, kv_offload_gb=0.5, state_memory_fraction=0.5, kv_cache_memory_bytes=1 << 24)
    sizes = resolve_sizing(plan, 8 * GIB)
    states, page = sizes.geometry.state_bytes, sizes.geometry.page_bytes
    part = sizes.checkpoints * states / (sizes.checkpoints * states + sizes.kv_bytes)
    assert sizes.host_checkpoints * states == pytest.approx(part * GIB / 2, rel=0.01)
    assert sizes.host_blocks * page + sizes.host_checkpoints * states <= GIB // 2
    assert sizes.host_blocks * page + sizes.host_checkpoints * states > GIB // 2 - page - states


def test_a_tier_without_room_for_both_is_refused() -> None:
    plan = planned(ARGS, kv_offload_gb=1e-5)
    words = r"not hold a KV block of .* KiB and a checkpoint of .* KiB each: raise kv_offload_gb to ([\d.e-]+) or more"
    with pytest.raises(ConfigError, match=words) as refused:
        resolve_sizing(plan, 8 * GIB)
    found = re.search(words, str(refused.value))
    assert found is not None
    named = float(found[1])
    assert resolve_sizing(planned(ARGS, kv_offload_gb=named), 8 * GIB).host_blocks == 1
    with pytest.raises(ConfigError, match="does not hold"):
        resolve_sizing(planned(ARGS, kv_offload_gb=0.98 * named), 8 * GIB)


@pytest.mark.parametrize(
    ("number", "text"), [(1.0, "1"), (0.12301, "0.124"), (1.21e-5, "1.21e-05"), (12.31, "12.4"), (9.996, "10")]
)
def test_a_number_is_rounded_up_to_three_digits(number: float, text: str) -> None:
    assert rounded_up(number) == text


def test_the_rank_with_fewest_checkpoints_decides_and_a_stage_without_states_does_not() -> None:
    sizes = resolve_sizing(planned(ARGS, kv_offload_gb=0.5), 8 * GIB)
    plain = resolve_sizing(planned(parse_checkpoint_config(tiny_config(Tiny(family="qwen3"))), kv_offload_gb=0.5), GIB)
    assert divide_tier(plain.geometry, 1000, 10, 0) == (1000, 0)
    joined = shared_sizes([sizes, plain])
    assert [one.host_checkpoints for one in joined] == [sizes.host_checkpoints] * 2
    assert [one.checkpoints for one in shared_sizes([plain])] == [0]

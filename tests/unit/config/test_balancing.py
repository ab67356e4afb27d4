"""`--eplb-config`: vLLM's names and defaults; what cannot be done is refused with the way out."""

from dataclasses import replace
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.config.balancing import EplbConfig, read_eplb_config
from quire.contracts.errors import ConfigError, UserError
from quire.contracts.parallel import Parallel
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, met

from ...support.changed_args import with_experts, with_mixer
from ...support.tiny_models import Tiny, tiny_config

SPREAD = Parallel(tp=2, dp=4, experts=True)


def test_the_defaults_are_those_of_vllm() -> None:
    defaults = EplbConfig(window_size=1000, step_interval=3000, num_redundant_experts=0, log_balancedness=False)
    assert read_eplb_config(None) == read_eplb_config({}) == defaults


def test_values_are_taken() -> None:
    given = {
        "window_size": 10,
        "num_redundant_experts": 32,
        "use_async": True,
        "communicator": None,
        "enable_migration_batching": False,
        "log_balancedness": True,
    }
    found = read_eplb_config(given)
    assert (found.window_size, found.num_redundant_experts, found.log_balancedness) == (10, 32, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 5}, "eplb_config: 'window' does not exist: use window_size, step_interval, "),
        ({"window_size": 10, "step_interval": 5}, "window_size=10 is longer than step_interval=5: lower"),
        ({"window_size": 0}, "window_size=0 is too small: give at least 1"),
        ({"num_redundant_experts": -1}, "num_redundant_experts=-1 is too small: give at least 0"),
        ({"step_interval": "3000"}, "step_interval='3000' must be a whole number"),
        ({"step_interval": True}, "step_interval=True must be a whole number"),
        ({"log_balancedness": 1}, "log_balancedness=1 must be true or false"),
        ({"policy": "random"}, "policy='random' is not implemented, because the policy is DeepSeek's"),
        ({"use_async": False}, "use_async=False is not implemented, because weights always move beside"),
        ({"communicator": "nixl"}, "communicator='nixl' is not implemented, because a rank copies .*: leave it out"),
        ({"enable_migration_batching": True}, "one layer moves at a time: leave it out"),
    ],
)
def test_a_wrong_setting_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_eplb_config(given)


def check_parallel(args: ModelArgs, parallel: Parallel) -> None:
    check(met(Inputs(args=args, parallel=parallel)))


def model(experts: int) -> ModelArgs:
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe")))
    assert args.moe is not None
    routing = replace(args.moe.routing, num_experts=experts)
    return with_experts(with_mixer(args, num_heads=8, num_kv_heads=8), routing=routing)


@pytest.mark.parametrize(
    ("experts", "parallel", "message"),
    [
        (256, replace(SPREAD, redundant=12), "268 slots for 256 experts do not divide among 8 ranks: use 0, 8 or 16"),
        (60, replace(SPREAD, redundant=0), "60 slots for 60 experts do not divide among 8 ranks: use 4, 12 or 20"),
        (8, replace(SPREAD, redundant=64), "a rank would have more slots than .* use at most 56"),
        (8, Parallel(tp=4, redundant=0), "has nothing to balance, .*: add --enable-expert-parallel"),
        (8, Parallel(experts=True, redundant=0), "has nothing to balance"),
        (8, Parallel(dp=2, redundant=0), "has nothing to balance"),
    ],
)
def test_slots_that_ranks_cannot_share_are_refused(experts: int, parallel: Parallel, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_parallel(model(experts), parallel)


def test_slots_that_divide_are_taken() -> None:
    check_parallel(model(256), replace(SPREAD, redundant=8))

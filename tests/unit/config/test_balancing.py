"""`--eplb-config`: vLLM's names and defaults; what cannot be done is refused with the way out."""

from typing import Any

import pytest

from quire.config.balancing import EplbConfig, check_balancing, read_eplb_config
from quire.config.placement import Parallel
from quire.contracts.errors import ConfigError

SPREAD = Parallel(tp=2, dp=4, experts=True)


def test_the_defaults_are_those_of_vllm() -> None:
    defaults = EplbConfig(window_size=1000, step_interval=3000, num_redundant_experts=0, log_balancedness=False,
                          log_balancedness_interval=1, use_async=True, policy="default")
    assert read_eplb_config(None) == read_eplb_config({}) == defaults


def test_values_are_taken() -> None:
    given = {"window_size": 10, "num_redundant_experts": 32, "use_async": False, "communicator": None,
             "enable_migration_batching": False}
    found = read_eplb_config(given)
    assert (found.window_size, found.num_redundant_experts, found.use_async) == (10, 32, False)


@pytest.mark.parametrize(("given", "message"), [
    ({"window": 5}, "eplb_config: 'window' does not exist: use window_size, step_interval, "),
    ({"window_size": 0}, "window_size=0 is too small: give at least 1"),
    ({"num_redundant_experts": -1}, "num_redundant_experts=-1 is too small: give at least 0"),
    ({"step_interval": "3000"}, "step_interval='3000' must be a whole number"),
    ({"step_interval": True}, "step_interval=True must be a whole number"),
    ({"use_async": 1}, "use_async=1 must be true or false"),
    ({"policy": "random"}, "policy='random' is not implemented: use 'default'"),
    ({"policy": None}, "policy=None must be a text"),
    ({"communicator": "nixl"}, "communicator='nixl' is not implemented, because a rank copies .*: leave it out"),
    ({"enable_migration_batching": True}, "one layer moves at a time: leave it out"),
])  # fmt: skip
def test_a_wrong_setting_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_eplb_config(given)


def test_slots_must_divide_among_the_ranks() -> None:
    check_balancing(EplbConfig(num_redundant_experts=8), 256, SPREAD)
    with pytest.raises(ConfigError, match="268 slots for 256 experts do not divide among 8 ranks: use 0, 8 or 16"):
        check_balancing(EplbConfig(num_redundant_experts=12), 256, SPREAD)
    with pytest.raises(ConfigError, match="60 slots for 60 experts do not divide among 8 ranks: use 4, 12 or 20"):
        check_balancing(EplbConfig(), 60, SPREAD)


@pytest.mark.parametrize("parallel", [Parallel(tp=4), Parallel(experts=True), Parallel(dp=2)])
def test_slices_of_experts_are_not_balanced(parallel: Parallel) -> None:
    with pytest.raises(ConfigError, match="has nothing to balance, .*: add --enable-expert-parallel"):
        check_balancing(EplbConfig(), 256, parallel)

"""Balancing of experts: the settings of vLLM's `--eplb-config`. `engine/eplb.py` has the policy."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.contracts.errors import ConfigError, shown

# Of `ExpertSlots.choose`: 2^32 / golden ratio (Knuth, volume 3, section 6.4), and any other odd number.
GOLDEN, SPREAD = 0x9E3779B9, 0x85EBCA6B
FIXED = {  # vLLM's other settings: the only value that is taken, and the reason
    "communicator": (None, "a rank copies weights from the memory of another rank"),
    "enable_migration_batching": (False, "one layer moves at a time"),
    "use_async": (True, "weights always move beside serving"),
    "log_balancedness_interval": (1, "the balancedness is known once for every step_interval"),
    "policy": ("default", "the policy is DeepSeek's"),
}


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """Settings of the balancing of experts, with vLLM's names and defaults.

    window_size             steps whose tokens a rebalance looks at: the last ones
    step_interval           steps between two rebalances
    num_redundant_experts   slots of a layer for second and further copies of hot experts
    log_balancedness        True: log the balancedness before each rebalance
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False


def read_eplb_config(given: Mapping[str, Any] | None) -> EplbConfig:
    """Return the settings that `eplb_config` gives. Raises `ConfigError` for a wrong name or value."""
    defaults = {one.name: one.default for one in fields(EplbConfig)}
    values: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name in FIXED:
            only, reason = FIXED[name]
            if value != only:
                raise ConfigError(
                    f"eplb_config: {name}={shown(value)} is not implemented, because {reason}: leave it out."
                )
            continue
        if name not in defaults:
            raise ConfigError(f"eplb_config: {shown(name)} does not exist: use {', '.join(defaults)}.")
        default = defaults[name]
        if type(value) is not type(default):
            kind = {bool: "true or false", int: "a whole number", str: "a text"}[type(default)]
            raise ConfigError(f"eplb_config: {name}={shown(value)} must be {kind}.")
        least = 0 if name == "num_redundant_experts" else 1
        if type(value) is int and value < least:
            raise ConfigError(f"eplb_config: {name}={value} is too small: give at least {least}.")
        values[name] = value
    made = EplbConfig(**values)
    if made.window_size > made.step_interval:
        raise ConfigError(
            f"eplb_config: window_size={made.window_size} is longer than step_interval="
            f"{made.step_interval}: lower window_size, or raise step_interval."
        )
    return made

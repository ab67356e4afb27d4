"""Options that can never work are refused by name, before anything is loaded."""

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": "8"}, "max_num_seqs='8': must be an integer or None, not str"),
        ({"max_num_seqs": True}, "max_num_seqs=True: must be an integer or None, not bool"),
        ({"max_model_len": 64.5}, "max_model_len=64.5: must be an integer or None, not float"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no': must be True or False, not str"),
        ({"watermark": "a"}, "watermark='a': must be a number, not str"),
        ({"watermark": 1.0}, r"watermark=1.0: must be in \[0, 1\)"),
        ({"num_threads": 0}, "num_threads=0: must be at least 1"),
        ({"async_depth": 3}, "async_depth=3: must be 1 or 2"),
        ({"override_generation_config": "x"}, "must be a mapping or None, not str"),
        ({"scheduling_policy": "lifo"}, "must be one of fcfs, priority"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "Lower max_num_seqs"),
        ({"max_model_length": 5}, "Did you mean 'max_model_len'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat(**options)


def test_flat_names_reach_their_component() -> None:
    config = EngineConfig.from_flat(model="m", watermark=0, block_size=8, override_generation_config={"top_k": 3})
    assert (config.model.model, config.scheduler.watermark, config.cache.block_size) == ("m", 0, 8)
    assert config.model.override_generation_config == {"top_k": 3}


def test_a_default_gives_way_to_what_was_asked_for() -> None:
    assert EngineConfig.from_flat(max_num_batched_tokens=32).scheduler.sequences() == 32
    assert EngineConfig.from_flat(max_num_batched_tokens=4096).scheduler.sequences() == 256
    many = EngineConfig.from_flat(max_num_seqs=4096).scheduler
    assert many.token_budget() == 4096

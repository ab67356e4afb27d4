"""An engine runs its first steps before it takes requests."""

from typing import Any

import pytest

from quire.assemble.warm_up import warm_up
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.engine.mock_core import build_mock_core
from quire.entry.core_process import build
from quire.procs.messages import Ready

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 1}, {"max_model_len": 2}, {"max_num_seqs": 1}, {"speculative_config": DRAFTS}]
)
def test_an_engine_is_as_new_after_its_first_steps(options: dict[str, Any]) -> None:
    core = build_mock_core(EngineConfig.from_flat(**options), bundled_model())
    warm_up(core)
    stats = core.state().stats
    assert (stats.num_running, stats.num_waiting, stats.prefix.queries, stats.prefix.hits) == (0, 0, 0, 0)
    assert stats.num_free_blocks == core.facts.num_blocks and not core.handles
    assert not any(core.scheduler.drafts.totals)
    core.check()


def test_steps_of_a_server_are_recorded_before_it_is_ready() -> None:
    config = EngineConfig.from_flat(device="cpu", num_threads=1, max_num_seqs=2, use_tqdm_on_load=False)
    core, ready = build(config, lambda message: None)
    try:
        described = core.executor.control("describe", {})
        assert isinstance(ready, Ready) and "first steps" in ready.phases
        assert described["recordings"] >= 1 and described["steps"]["replayed"] >= 1
    finally:
        core.shutdown()

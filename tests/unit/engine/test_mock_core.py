"""The core of `--device mock`: sized by a model's config.json, with answers that are known beforehand."""

import time
from array import array
from typing import Any

import numpy as np
import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.core import EngineCore
from quire.engine.mock_core import build_mock_core
from quire.engine.mock_executor import MockExecutor
from quire.plan.meetings import check, inputs_of, met

from ...support.mock_tokens import mock_tokens


def core(**options: Any) -> EngineCore:
    check(met(inputs_of(EngineConfig.from_flat(device="mock", **options))))
    return build_mock_core(EngineConfig.from_flat(device="mock", **options), bundled_model())


def new(handle: int, prompt: list[int], tokens: int, **spec: Any) -> NewRequest:
    sampler = SamplerSpec(seed=handle, num_prompt=len(prompt), **spec)
    return NewRequest(
        handle=handle,
        request_id=str(handle),
        token_ids=array("I", prompt).tobytes(),
        max_tokens=tokens,
        sampler=sampler,
    )


def drain(engine: EngineCore) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        outputs = engine.step()
        for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
            tokens.setdefault(handle, []).append(token)
    engine.check()
    return tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_gets_its_own_tokens_also_when_it_is_preempted(depth: int) -> None:
    engine = core(async_depth=depth, max_model_len=128, block_size=8, num_gpu_blocks_override=20, max_num_seqs=8)
    prompts = {handle: list(range(handle, handle + 30)) for handle in range(6)}
    for handle, prompt in prompts.items():
        engine.add(new(handle, prompt, 40))
    vocab = engine.facts.vocab_size
    assert drain(engine) == {h: mock_tokens(p, h, 40, vocab) for h, p in prompts.items()}
    assert engine.scheduler.num_preempted > 0


def test_its_sizes_are_the_model_s_unless_asked_otherwise() -> None:
    facts = core().facts
    assert (facts.vocab_size, facts.max_model_len, facts.num_slots) == (8192, 4096, 256)
    facts = core(max_model_len=100, block_size=16, num_gpu_blocks_override=7, max_num_seqs=3, async_depth=2).facts
    assert (facts.max_model_len, facts.block_size, facts.num_blocks, facts.num_slots, facts.depth) == (100, 16, 7, 3, 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="context of 4096"):
        core(max_model_len=5000)
    assert core(num_gpu_blocks_override=3, block_size=16).facts.max_model_len == 48  # a default, so it gives way
    with pytest.raises(ConfigError, match="raise num_gpu_blocks_override"):
        core(max_model_len=1000, num_gpu_blocks_override=3)
    with pytest.raises(ConfigError, match="leave out kv_offload_gb"):
        core(kv_offload_gb=1.0)
    with pytest.raises(ConfigError, match="leave out kv_offload_gb, kv_offload_dir"):
        core(kv_offload_dir="/kv")
    with pytest.raises(ConfigError, match='no layers for method mtp: use "method": "ngram"'):
        core(speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def test_drafts_are_planned_as_for_a_device() -> None:
    ranges = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}
    assert core(speculative_config={"method": "ngram"} | ranges).facts.drafts_by_batch == ((1, 3), (2, 0))
    facts = core(speculative_config={"method": "ngram", "num_speculative_tokens": "auto"}).facts
    assert facts.auto_drafts == (1, 3, 7) and facts.num_drafts == 7


def test_logprobs_are_made_up_in_the_right_form() -> None:
    engine = core()
    engine.add(new(0, [1, 2, 3], 2, num_logprobs=3, num_prompt_logprobs=2))
    engine.add(new(1, [4], 2, num_logprobs=2, logprob_ids=(9, 11)))
    outputs = engine.step()
    rows, scored, asked = outputs.logprobs[0], outputs.prompt_logprobs[0], outputs.logprobs[1]
    token = int(outputs.tokens[0])
    assert rows.ids.tolist() == [[token, token, token + 1, token + 2]] and rows.ranks.tolist() == [1]
    assert rows.logprobs[0, 0] == rows.logprobs[0, 1] > rows.logprobs[0, 2] and rows.logprobs.dtype == np.float32
    assert scored.ids[:, 0].tolist() == [2, 3] and scored.ids.shape == (2, 3)
    assert asked.ids.tolist() == [[int(outputs.tokens[1]), 9, 11]]


def test_steps_take_their_time_one_after_the_other() -> None:
    mock = MockExecutor(depth=2, step_seconds=0.02)
    engine = core(mock_step_ms=20.0, async_depth=2)
    assert mock.facts().depth == engine.facts.depth
    engine.add(new(0, [1], 5))
    began = time.monotonic()
    drain(engine)
    assert time.monotonic() - began >= 5 * 0.02

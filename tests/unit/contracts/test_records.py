"""The records that cross between rooms: what they hold, that they do not change, and that they stand alone."""

import subprocess
import sys
from array import array

import numpy as np
import pytest

from quire.contracts import errors
from quire.contracts.blocks import NULL_BLOCK, PAGE_ALIGN, KVComponent, KVGeometry, KVGroup, StateComponent, StateGroup
from quire.contracts.output import CompletionOutput, StepOutputs
from quire.contracts.request import NewRequest, Request, RequestState
from quire.contracts.sampling import SamplerSpec
from quire.contracts.seeds import child_seed
from quire.contracts.step import PROMPT_LOGPROBS, SAMPLE, StepPlan, StepResult


def new(**fields: object) -> NewRequest:
    base: dict[str, object] = {
        "handle": 7,
        "request_id": "r7",
        "token_ids": array("I", [5, 6, 2**32 - 1]).tobytes(),
        "max_tokens": 4,
        "sampler": SamplerSpec(seed=1, num_prompt=3),
    }
    return NewRequest(**{**base, **fields})  # type: ignore[arg-type]


def test_a_request_starts_waiting_with_its_prompt() -> None:
    request = Request(new(stop_ids=(2, 2, 3)), arrival=11)
    assert request.state is RequestState.WAITING and request.blocked_on is None
    assert list(request.tokens) == [5, 6, 2**32 - 1] and (request.num_prompt, request.end) == (3, 7)
    assert request.stop_ids == {2, 3} and request.slot == -1 and request.num_cached == -1


def test_a_new_request_has_every_default_and_cannot_change() -> None:
    request = new()
    assert (
        request.stop_ids,
        request.embeds,
        request.priority,
        request.parent,
        request.deadline,
        request.cache_salt,
        request.read_prefix_cache,
    ) == ((), b"", 0, None, None, "", True)
    with pytest.raises(AttributeError):
        request.max_tokens = 9  # type: ignore[misc]


def test_a_plan_has_empty_columns_of_the_right_shape() -> None:
    one = np.ones(1, np.int32)
    plan = StepPlan(step=3, slots=one, num_decodes=1, num_tokens=one, num_rows=one, outputs=np.ones(1, np.uint8))
    assert plan.appended.shape == (0, 3) and plan.released.shape == (0,) and plan.admitted == () and plan.shared == ()
    other = StepPlan(step=4, slots=one, num_decodes=1, num_tokens=one, num_rows=one, outputs=np.ones(1, np.uint8))
    assert plan.appended is not other.appended
    with pytest.raises(AttributeError):
        plan.step = 5  # type: ignore[misc]
    assert SAMPLE & PROMPT_LOGPROBS == 0


def test_a_result_has_no_failures_unless_told() -> None:
    empty = np.empty(0, np.int32)
    result = StepResult(step=0, slots=empty, tokens=empty.reshape(0, 1), num_accepted=empty)
    assert (result.failed, result.logprobs, result.prompt_logprobs, result.num_computed) == ({}, {}, {}, 0)
    outputs = StepOutputs(handles=empty, tokens=empty)
    assert (outputs.finished, outputs.cached, outputs.stats.step) == ((), {}, -1)


def test_a_completion_is_finished_when_it_has_a_reason() -> None:
    assert not CompletionOutput(index=0, text="", token_ids=[]).finished()
    assert CompletionOutput(index=0, text="", token_ids=[], finish_reason="stop").finished()


def test_page_sizes() -> None:
    """128 tokens x 2 heads x 64 dims x 2 bytes = 32 KiB per component; small ones are padded to the alignment."""
    k = KVComponent("k", num_heads=2, head_dim=64, dtype="bfloat16", item_bytes=2)
    geometry = KVGeometry(groups=(KVGroup(block_size=128, layers=(0, 1, 2), components=(k, k)),))
    assert k.num_bytes(128) == 32768 and geometry.page_bytes == 3 * 2 * 32768
    assert KVComponent("s", 1, 1, "float32", 4).num_bytes(4) == PAGE_ALIGN
    assert [geometry.request_blocks(n, 1) for n in (0, 1, 128, 129)] == [0, 1, 1, 2] and NULL_BLOCK == 0


def test_groups_of_equal_pages_with_other_blocks() -> None:
    """Half the bytes of a token, twice the tokens of a block: pages are equal; 5 tokens take 2 blocks and 1."""
    wide, narrow = KVComponent("k", 4, 64, "bfloat16", 2), KVComponent("k", 2, 64, "bfloat16", 2)
    groups = (
        KVGroup(layers=(0, 1), components=(wide,), block_size=4, window=8),
        KVGroup(layers=(2, 3), components=(narrow,), block_size=8),
    )
    geometry = KVGeometry(groups=groups)
    assert {group.page_bytes for group in groups} == {geometry.page_bytes} == {2 * 4 * 4 * 64 * 2}
    assert [geometry.table_entries(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 2, 2, 3, 3, 5]
    assert [geometry.request_blocks(n, 1) for n in (0, 1, 4, 5, 8, 9, 100)] == [0, 2, 2, 3, 3, 5, 13 + 3]
    assert [geometry.most_tokens(n, 1, 40) for n in (0, 1, 2, 3, 5, 6, 9)] == [0, 0, 4, 8, 16, 24, 40]
    assert (geometry.block_size, geometry.hit_size, geometry.block_sizes) == (4, 8, (4, 8))


def test_entries_of_several_tokens_and_states() -> None:
    """A cache that keeps one entry for 4 tokens; a layer's matrix of 2 heads and its columns, padded to PAGE_ALIGN."""
    part = KVComponent("latent", 1, 512, "bfloat16", 2)
    group = KVGroup(layers=(0,), components=(part,), block_size=128, tokens_per_entry=4)
    assert group.entries == 32 and group.page_bytes == 32 * 512 * 2
    matrix, columns = StateComponent("state", (2, 64, 64), "float32", 4), StateComponent("conv", (3, 5), "bfloat16", 2)
    assert StateGroup(layers=(1, 2, 3), components=(matrix, columns)).slot_bytes == 3 * (2 * 64 * 64 * 4 + PAGE_ALIGN)


def test_child_seeds_are_distinct_uint64_and_the_first_is_the_parents() -> None:
    assert child_seed(9, 0) == 9
    seeds = {child_seed(seed, index) for seed in range(20) for index in range(1, 20)}
    assert len(seeds) == 20 * 19 and all(0 <= s < 2**64 for s in seeds)
    with pytest.raises(AssertionError):
        child_seed(-1, 0)


def test_one_error_tree() -> None:
    """Users catch ValueError for what they can fix, RuntimeError for what they cannot, QuireError for all."""
    tree = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert len(tree) == 20 and all(issubclass(kind, errors.QuireError) for kind in tree.values())
    for name, kind in tree.items():
        if name != "QuireError":
            assert issubclass(kind, errors.UserError) != issubclass(kind, errors.EngineError)
    assert issubclass(errors.UserError, ValueError) and issubclass(errors.EngineError, RuntimeError)
    assert errors.RequestFailed("x", code="nan_logits").code == "nan_logits"
    assert errors.InvalidParameter("x", param="top_p").param == "top_p"


def test_contracts_and_engine_stand_without_torch() -> None:
    code = (
        "import sys, quire.engine.core, quire.engine.mock_executor; "
        "assert not {'torch', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})

"""Windows with what else an engine does: ranks, stages, drafts, tiers. Tokens are those of one engine without them.

"unequal": KV groups with different heads, and blocks of different sizes.
"""

from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs
from quire.plan import kv_geometry
from quire.plan.kinds import mixer

from ..support.pairwise import Row

MIXED = (("use_sliding_window", True), ("max_window_layers", 1), ("sliding_window", 11), ("num_hidden_layers", 4))
ALL = (("sliding_window", 11),)
NUM_TOKENS = 48


@pytest.fixture(scope="module", params=["mixed", "all", "unequal"])
def checkpoint(request: pytest.FixtureRequest, oracle: Any, tiny: Any) -> Any:
    kinds = {"mixed": ("qwen3", MIXED), "all": ("mistral", ALL), "unequal": ("gemma4_text", ())}
    family, changes = kinds[request.param]
    return oracle(tiny(family=family, changes=changes), NUM_TOKENS)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
        {"kv_offload_gb": 0.01, "num_gpu_blocks_override": 60},
    ],
    ids=["tp", "pp", "ngram", "draft_model", "tiers"],
)
def test_tokens(
    options: Row, checkpoint: Any, oracle: Any, tiny: Any, engine: Any, prompts: list[list[int]], greedy: Any
) -> None:
    if options.get("speculative_config", {}).get("method") == "draft_model":
        draft: Path = oracle(tiny(family="qwen3", changes=MIXED[:3]), NUM_TOKENS).folder
        options = {"speculative_config": options["speculative_config"] | {"model": str(draft)}}
    llm = engine(checkpoint.folder, block_size=8, max_num_batched_tokens=16, max_num_seqs=7, **options)
    expected = checkpoint.greedy(prompts, NUM_TOKENS)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == expected
    llm.engine.core.check()


@pytest.mark.parametrize(("full", "window"), [(16, 8), (8, 32)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
        {"kv_offload_gb": 0.01, "num_gpu_blocks_override": 60},
    ],
    ids=["plain", "draft_model", "tiers"],
)
def test_blocks_of_other_sizes(
    options: Row,
    full: int,
    window: int,
    oracle: Any,
    tiny: Any,
    engine: Any,
    prompts: list[list[int]],
    greedy: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups with a window and those without have blocks of different sizes, as if their layers' bytes differed."""

    def sizes(args: ModelArgs, grouped: list[list[int]], *_: Any, **__: Any) -> tuple[int, ...]:
        windows = (mixer(args.layers[layers[0]].mixer).window for layers in grouped)
        return tuple(full if one is None else window for one in windows)

    monkeypatch.setattr(kv_geometry, "block_sizes", sizes)
    checkpoint = oracle(tiny(family="qwen3", changes=MIXED), NUM_TOKENS)
    if "speculative_config" in options:
        options = {"speculative_config": options["speculative_config"] | {"model": str(checkpoint.folder)}}
    llm = engine(checkpoint.folder, block_size=8, max_num_batched_tokens=16, max_num_seqs=7, **options)
    expected = checkpoint.greedy(prompts, NUM_TOKENS)
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == expected
    core = llm.engine.core
    core.check()
    assert {one.block_size for one in core.scheduler.allocator.groups} == {full, window}
    assert core.scheduler.admitter.prefix_hits > 0

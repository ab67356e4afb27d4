"""Windows with what else an engine does: ranks, stages, drafts, tiers. Tokens are those of one engine without them.

"unequal": KV groups with different heads, and blocks of different sizes.
"""

from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs
from quire.plan import kv_geometry
from quire.plan.kinds import mixer

from ..support.full import full_rows
from ..support.pairwise import Row

MIXED = (("use_sliding_window", True), ("max_window_layers", 1), ("sliding_window", 11), ("num_hidden_layers", 4))
ALL = (("sliding_window", 11),)
NUM_TOKENS = 48


KINDS = {"mixed": ("qwen3", MIXED), "all": ("mistral", ALL), "unequal": ("gemma4_text", ())}
OPTIONS: dict[str, Row] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "draft_model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
    "tiers": {"kv_offload_gb": 0.01, "num_gpu_blocks_override": 60},
}
# Several groups with each option, equal and unequal ones in turn; one group with those that know of groups.
ALWAYS = [
    ("mixed", "pp"),
    ("mixed", "ngram"),
    ("mixed", "draft_model"),
    ("mixed", "tiers"),
    ("all", "pp"),
    ("all", "draft_model"),
    ("unequal", "tp"),
    ("unequal", "draft_model"),
    ("unequal", "tiers"),
]
MORE = [(kind, option) for kind in KINDS for option in OPTIONS if (kind, option) not in ALWAYS]


@pytest.mark.parametrize(("kind", "option"), [*ALWAYS, *full_rows(MORE)])
def test_tokens(
    kind: str, option: str, oracle: Any, tiny: Any, engine: Any, prompts: list[list[int]], greedy: Any
) -> None:
    (family, changes), options = KINDS[kind], OPTIONS[option]
    checkpoint = oracle(tiny(family=family, changes=changes), NUM_TOKENS)
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

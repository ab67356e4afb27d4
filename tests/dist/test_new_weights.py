"""New weights and sleep on several ranks: tokens of an engine that starts with these weights."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import UserError

from ..support.full import full_rows
from ..support.tiny_models import Tiny, random_model, write_model

PROMPTS = [{"prompt_token_ids": [(7 * i + s) % 90 + 1 for i in range(30)]} for s in range(3)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "max_model_len": 64, "max_num_seqs": 4,
    "block_size": 16, "dtype": "float32", "num_threads": 1, "use_tqdm_on_load": False,
}  # fmt: skip
LIFE = {"weight_transfer_config": {"backend": "files"}, "enable_sleep_mode": True}
TP, PP, DP = ({f"{name}_parallel_size": 2} for name in ("tensor", "pipeline", "data"))


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", TP),
        *full_rows(
            [
                ("qwen3", PP),
                ("qwen3", DP),
                ("qwen3_moe", TP | {"enable_expert_parallel": True}),
                ("qwen3_moe", DP | {"enable_expert_parallel": True, "enforce_eager": True}),
            ]
        ),
    ],
    ids=str,
)
def test_ranks_take_new_weights_and_sleep_together(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    folders = [tmp_path / str(seed) for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        write_model(random_model(Tiny(family=family), seed), folder, family)
    with LLM(str(folders[1]), **SMALL) as llm:
        expected = tokens(llm)

    def update(folder: Path) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(folder)}})
        llm.finish_weight_update()

    with LLM(str(folders[0]), **SMALL, **LIFE, **sizes) as llm:
        old = tokens(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == old
        with pytest.raises(UserError, match="no folder"):
            update(tmp_path / "nowhere")
        with pytest.raises(UserError, match="under way"):
            llm.start_weight_update()
        with pytest.raises(UserError, match="no tensors"):
            llm.finish_weight_update()
        assert tokens(llm) == old
        update(folders[1])
        assert tokens(llm) == expected

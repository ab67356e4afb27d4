"""Draft models beside windows, chunks of attention, KV of other layers and inputs of layers: text is that of the model.

"some": the drafter is the model with noise in its weights, so that runs end at any place of a window, a chunk or a
block. "all": the drafter has the model's weights, and every draft is right only if its KV is right, too.
"""

from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.args.checkpoint import parse_checkpoint_config
from quire.args.layers import RecurrentArgs
from quire.config.bundled import bundled_model

from ..support.full import full_rows
from ..support.pairwise import Row
from ..support.prediction_layers import FAMILIES as PREDICTING
from ..support.prediction_layers import noisy, predicting
from ..support.tiny_models import FAMILIES, Tiny, tiny_config

NUM_TOKENS, DRAFTS = 48, 3
SMALL: Row = {"num_gpu_blocks_override": 70, "kv_offload_gb": 0.01, "async_depth": 1}
# Windows that no text outgrows: the layers are KV groups of their own and compute what layers of full attention do.
WIDE: dict[str, tuple[tuple[str, Any], ...]] = {
    "full": (("num_hidden_layers", 4),),
    "mixed": (
        ("use_sliding_window", True),
        ("max_window_layers", 1),
        ("sliding_window", 127),
        ("num_hidden_layers", 4),
    ),
    "windows": (
        ("use_sliding_window", True),
        ("max_window_layers", 0),
        ("sliding_window", 127),
        ("num_hidden_layers", 4),
    ),
}


def drafted(
    engine: Any, folder: Path, drafter: Path | None, prompts: list[list[int]], greedy: Any, **options: Any
) -> Any:
    """Return the texts of two rounds, the second from the prefix cache, and the counts of drafts."""
    given: Row = {"method": "mtp" if drafter is None else "draft_model", "num_speculative_tokens": DRAFTS}
    given |= {} if drafter is None else {"model": str(drafter)}
    batch: Row = {"block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 7}
    llm = engine(folder, speculative_config=given, **batch | options)
    rounds = [llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False) for _ in range(2)]
    llm.engine.core.check()
    texts = [[one.outputs[0].token_ids for one in outputs] for outputs in rounds]
    return texts, llm.engine.core.scheduler.drafts.totals


def attends(family: str) -> bool:
    """True if all layers attend: draft models with recurrent layers, or of them, are refused."""
    mixers = parse_checkpoint_config(tiny_config(Tiny(family=family))).mixers
    return not any(isinstance(one, RecurrentArgs) for one in mixers)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma4_inputs", {}),
        ("llama4_text", SMALL),
        ("gpt_oss", {"async_depth": 1}),
        *full_rows((family, options) for family in FAMILIES if attends(family) for options in ({}, SMALL)),
    ],
    ids=str,
)
def test_some_drafts_are_right(
    family: str,
    options: Row,
    oracle: Any,
    tiny: Any,
    engine: Any,
    prompts: list[list[int]],
    greedy: Any,
    tmp_path: Path,
) -> None:
    checkpoint = oracle(tiny(family=family))
    drafter = noisy(checkpoint.folder, tmp_path / "draft")
    texts, totals = drafted(engine, checkpoint.folder, drafter, prompts, greedy, **options)
    assert texts == [checkpoint.greedy(prompts, NUM_TOKENS)] * 2
    _, made, *right = totals
    assert 0.05 * made < sum(right) < 0.8 * made and all(right)


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("mixed", "full"),
        ("full", "windows"),
        ("windows", "mixed"),
        *full_rows([("full", "mixed"), ("windows", "full"), ("mixed", "windows")]),
    ],
)
def test_all_drafts_of_other_groups_are_right(
    target: str,
    drafter: str,
    oracle: Any,
    tiny: Any,
    engine: Any,
    prompts: list[list[int]],
    greedy: Any,
    tmp_path: Path,
) -> None:
    """The drafter's layers are in groups of the target's, or in their own."""
    checkpoint, other = (oracle(tiny(family="qwen3", changes=WIDE[kind])) for kind in (target, drafter))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").symlink_to(checkpoint.folder / "model.safetensors")
    (tmp_path / "draft" / "config.json").write_bytes((other.folder / "config.json").read_bytes())
    texts, totals = drafted(engine, checkpoint.folder, tmp_path / "draft", prompts, greedy)
    assert texts == [checkpoint.greedy(prompts, NUM_TOKENS)] * 2
    runs, made, *right = totals
    assert right[:2] == [runs, runs] and sum(right) == made


@pytest.mark.parametrize("family", ["glm4_moe_lite", *full_rows(PREDICTING)])
def test_a_prediction_layer_of_each_family_is_right(
    family: str, engine: Any, prompts: list[list[int]], greedy: Any, tmp_path: Path
) -> None:
    folder = predicting(tmp_path / "model", family, bundled_model(), 0.0)
    plain = engine(folder).generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    texts, totals = drafted(engine, folder, None, prompts, greedy)
    assert texts == [[one.outputs[0].token_ids for one in plain]] * 2
    runs, made, *right = totals
    assert right[:2] == [runs, runs] and sum(right) == made

"""Decoders of transformers over several ranks answer as transformers' own model does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

from ..support.foreign_models import MODELS, make_foreign
from ..support.full import FULL, full_rows
from ..support.tiny_models import mixed_prompts

STEPS = 64 if FULL else 20
PREPARED = [name for name in MODELS if name not in ("hunyuan_v1_dense", "persimmon", "olmoe", "starcoder2")]
ROWS = [("starcoder2", "tp"), *full_rows([(name, "tp") for name in PREPARED])]
ROWS += full_rows([(name, "pp") for name in MODELS])
SIZES: dict[str, dict[str, Any]] = {"tp": {"tensor_parallel_size": 2}, "pp": {"pipeline_parallel_size": 2}}


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_two_ranks(name: str, way: str, engine: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = mixed_prompts()
    folders: Callable[[str], Path] = tmp_path_factory.mktemp
    truth = make_foreign(name, folders, prompts, STEPS)
    llm = engine(truth.folder, **SIZES[way], max_num_batched_tokens=16, block_size=8, check_collectives=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    got = llm.generate(prompts, greedy, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in got] == truth.greedy(prompts, STEPS)

"""Layers with sliding windows: transformers' logits and tokens, for any window, block, chunk and pool."""

from typing import Any

import pytest

from ..support.full import full_rows
from ..support.pairwise import Row, label
from ..support.windowed_models import MODELS, windowed
from .test_parity import Greedy, build, check_run

NORMAL = {"batch": 7, "chunk": 16, "block_size": 8, "prefix": True, "depth": 2, "pool": "normal"}
SMALL = {"batch": 7, "chunk": 7, "block_size": 8, "prefix": True, "depth": 1, "pool": "small"}
WIDE = {"batch": 7, "chunk": 64, "block_size": 16, "prefix": False, "depth": 2, "pool": "normal"}
ROWS: list[Row] = [
    {"model": "all", "window": 5} | NORMAL,  # smaller than a block
    {"model": "all", "window": 8} | WIDE,  # half a block
    {"model": "last", "window": 21} | SMALL,
    {"model": "most", "window": 7} | WIDE,  # smaller than a chunk
    {"model": "experts", "window": 33} | NORMAL,  # larger than a chunk
    *full_rows(
        {"model": model, "window": window} | run
        for model in MODELS
        for window in (1, 5, 8, 9, 21, 64, 100)
        for run in (NORMAL, SMALL, WIDE)
        if (model, run) != ("all", SMALL)  # windows alone never outgrow what they were admitted with
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_logits_and_tokens(row: Row, oracle: Any, engine: Any, prompts: list[list[int]], greedy: Greedy) -> None:
    checkpoint = oracle(windowed(row["model"], row["window"]))
    llm = build(engine, checkpoint.folder, row)
    check_run(llm, checkpoint, prompts, row, greedy)
    llm.engine.core.check()

"""Engines on one folder of KV blocks: those with equal weights find each other's, all others find none."""

import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.weights.files import read_checkpoint

OPTIONS: dict[str, Any] = {
    "model": "m",  # relative: by name alone the folders are one
    "dtype": "float32", "num_gpu_blocks_override": 14, "max_model_len": 192, "max_num_seqs": 1, "block_size": 16,
    "kv_offload_gb": 0.02, "kv_offload_policy": "write_through", "enforce_eager": True,
}  # fmt: skip
PROMPT = "The code of Lakral is 6423, and Mira knows it. " * 3


def cached(work: Path, blocks: Path) -> int:
    """Start an engine in the folder `work`, ask once, and return the number of tokens that were not computed."""
    before = Path.cwd()
    os.chdir(work)
    try:
        with LLM(**OPTIONS, kv_offload_dir=str(blocks)) as llm:
            asked = SamplingParams(max_tokens=1, temperature=0.0)
            (output,) = llm.generate([PROMPT], asked, use_tqdm=False)
            return output.num_cached_tokens or 0
    finally:
        os.chdir(before)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        copytree(bundled_model(), tmp_path / name / "m")
        return tmp_path / name

    return make


def change_norm(work: Path) -> None:
    """Change six values of a norm, between what samples of the file would read. Its name, size and time stay."""
    norm = read_checkpoint(work / "m").tensors["model.norm.weight"]
    times = norm.file.stat().st_mtime_ns
    with norm.file.open("r+b") as file:
        file.seek(norm.offset)
        first = file.read(12)
        file.seek(norm.offset)
        file.write(bytes(byte ^ 32 * (at % 2 == 0) for at, byte in enumerate(first)))
    os.utime(norm.file, ns=(times, times))


def test_engines_share_files_exactly_when_their_weights_are_equal(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    first, same, other = (copied(name) for name in ("a", "b", "c"))
    for path in (same / "m").iterdir():
        os.utime(path, (1, 1))  # a copy of the weights is the same, whatever its times
    change_norm(other)
    blocks = tmp_path / "blocks"
    assert cached(first, blocks) == 0
    assert cached(other, blocks) == 0
    assert cached(same, blocks) > 0
    change_norm(first)  # replaced in place
    assert cached(first, blocks) > 0, "these are the weights of the third folder now"
    assert len(list(blocks.iterdir())) == 2

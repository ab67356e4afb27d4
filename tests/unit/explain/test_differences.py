"""Differences of two plans: values, named parts of lists, and layers that change alike."""

import json
from pathlib import Path

import pytest

from quire import bench
from quire.entry.cli.main import main

MODEL = str(Path(bench.__file__).with_name("models") / "qwen3-30b-a3b")


def changed(capsys: pytest.CaptureFixture[str], words: str, *flags: str) -> dict[str, tuple[str, str]]:
    assert main(["explain", MODEL, "--device", "h200", "--json", "--diff", words, *flags]) == 0
    return {one["path"]: (one["one"], one["other"]) for one in json.loads(capsys.readouterr().out)}


def test_flags_behind_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of the line stay: the block size, which is that of both."""
    found = changed(capsys, "-tp 2 --kv-cache-dtype fp8", "--block-size", "64")
    assert found["kernels.attention.reason"][1].endswith("with e4m3 cache")
    assert found["layers.0-47.weights.attention.output.weight.shard"] == ('""', "columns")
    assert found["memory.kv_bytes_per_token"] == ("98,304", "24,576")
    assert found["ranks.1"][0] == "nothing" and found["groups.tp"][1] == "tp"
    assert not any(path.startswith(("layers.3.", "floors", "model")) or "block_size" in path for path in found)


def test_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = changed(capsys, MODEL + "-fp8")
    assert found["model.format"] == ("unquantized", "fp8 in blocks of 128 x 128")
    assert "experts.scaled.run" in found["layers.0-47.calls"][1]
    assert "layers.0-47.weights.mlp.router.weight.format" not in found


def test_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", MODEL, "--device", "h200", "--diff", "--seed 3"]) == 0
    assert capsys.readouterr().out == "Both plans are the same.\n"


def test_a_wrong_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", MODEL, "--device", "h200", "--diff", "--no-such-flag 3"]) != 0
    assert "--no-such-flag" in capsys.readouterr().err

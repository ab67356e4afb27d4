"""The floors of steps, as `quire explain` prints them."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.workload import model_folder
from quire.entry.cli.main import main

MTP = '{"method": "mtp", "num_speculative_tokens": 3}'


def printed(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> str:
    assert main(["explain", str(folder), "--load-format", "dummy", *flags]) == 0
    return " ".join(capsys.readouterr().out.replace("│", "").split())


def test_a_launch_line_of_eight_replicas(shared: Path, capsys: Any) -> None:
    """The slowest part is named; decodes that the KV cache has no room for are not counted."""
    flags = "--device h200 -dp 8 -ep --max-num-seqs 32 --max-num-batched-tokens 128 --max-model-len 50000".split()
    text = printed(capsys, shared / "hf" / "DeepSeek-V3", *flags, "--speculative-config", MTP)
    for words in (
        "floors of a step of rank 0, the slowest: bytes over bandwidth",
        "rates of an H200 (measured): 4.30 TB/s of memory, 780 TFLOP/s",
        "a decode step, 32 requests a replica, context 4,096, 3 drafts each: ",
        " if all drafts are right); slowest: routed experts",
        "request a replica (all that the KV cache has room for), context 50,000, 3 drafts each".removeprefix(
            "request "
        ),
        "routed experts: 76.14 GiB, 19.01 ms, ",
        "passes that draft: ",
        "a prompt step, 128 tokens, context 4,096: ",
        "first pass of the drafter (in steps with decodes: the tokens that the last step accepted)",
    ):
        assert words in text, words
    assert "across hosts" not in text


def test_replicas_of_several_hosts(shared: Path, capsys: Any) -> None:
    text = printed(capsys, shared / "hf" / "DeepSeek-V3", *"--device h200 -dp 16 -ep --max-num-seqs 32".split())
    for words in (
        "experts in prefill and decode: dispatcher all-gather",
        "not pull with any kernel: pull joins at most 8 ranks, those of one host",
        "decodes of 1, 2, 4, 8, 16 to 32 by 8 requests (7 sizes), of one size on all replicas: that of the fullest",
        "exchanges across hosts: ",
        "no network between hosts was measured: the time above lacks these exchanges",
    ):
        assert words in text, words


def test_weights_in_host_memory_bound_a_decode_and_hide_behind_a_prompt(capsys: Any) -> None:
    """A rank counts its own layers, and their bytes leave its device, but for the two slots."""
    folder, flags = model_folder("qwen3-8b"), "--device h200 -tp 2 --cpu-offload-gb 1 --max-num-seqs 4".split()
    text = printed(capsys, folder, *flags)
    for words in (
        "weights by device: 2 x cuda 6.91 GiB each",
        "1.08 GiB of them in host memory, of the layers 5, 11, 17, 23, 29, 35 (6 layers of 36, evenly spread, so that "
        "each is copied while the layers before it compute); they come to 368.0 MiB of the device",
        "while loading at most 8.65 GiB of cuda: ",
        "weights 6.9, ",
        "55.5 GB/s from host memory",
        "4 requests a replica, context 4,096: 20.86 ms, ",
        "slowest: copies of layers from host memory, beyond the time of all other parts",
        "beyond the time of all other parts: 1.08 GiB, 0.00 ms, 0%",
    ):
        assert words in text, words
    cost = printed(capsys, folder, *flags, "--cost")
    assert ", beside copies of layers from host memory 20.858 ms; floor 20.858 ms, 100% of it" in cost


def test_a_draft_model_on_ranks_is_planned(shared: Path, capsys: Any) -> None:
    """Its weights, passes and exchanges are a part of the plan."""
    drafts = {"method": "draft_model", "model": str(shared / "hf" / "Qwen3-0.6B"), "num_speculative_tokens": 3}
    flags = ["--device", "h200", "-tp", "2", "--max-num-seqs", "16", "--speculative-config", json.dumps(drafts)]
    text = printed(capsys, shared / "hf" / "Qwen3-8B", *flags)
    for words in (
        "the drafter has 1.11 GiB of weights",
        "passes that draft: 12.17 GiB",
        "later passes of the drafter (in steps with decodes: a token of each decode in each pass)",
        "all-reduce over tp, attention output: 2.0 KiB per token x 56",
    ):
        assert words in text, words

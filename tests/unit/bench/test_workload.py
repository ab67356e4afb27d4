"""The workloads are the ones that result files of other engines were made with."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.bench.workload import Workload, fastest_run, load_workloads, model_folder, model_names

RESULTS = Path(__file__).resolve().parents[3] / "tools" / "peer" / "results"


def test_a_draw_is_pinned() -> None:
    """Changing the order of draws would make results incomparable with those in tools/peer/results."""
    (work,) = load_workloads(["mixed_1000"], scale=0.003)
    assert [len(p) for p in work.prompts] == [928, 610, 295]
    assert work.prompts[0][:4] == [25836, 14781, 2326, 9484]
    assert work.outputs == [261, 361, 197]


def test_counts_equal_the_peers_rows() -> None:
    rows = json.loads((RESULTS / "h200-vllm-0.26-qwen3-0.6b.json").read_text())["runs"]
    drawn = {work.name: work for work in load_workloads()}
    assert rows and all(
        (row["requests"], row["input_tokens"], row["output_tokens"])
        == (len(work.prompts), work.num_input_tokens, sum(work.outputs))
        for row in rows
        for work in [drawn[row["workload"]]]
    )


def test_scale_and_max_len() -> None:
    works = list(load_workloads(["latency_b1", "decode_b64", "shared_prefix"], scale=0.125, max_len=16))
    assert [len(work.prompts) for work in works] == [1, 8, 32]
    assert all(n == 16 for work in works for n in work.outputs)
    shared = works[2].prompts
    assert all(len(p) == 32 and p[:16] == shared[0][:16] for p in shared)


def test_edits_repeat_their_prompts_code_and_are_run_only_when_they_are_named() -> None:
    one, many = load_workloads(["edits_b1", "edits_b64"])
    assert all(700 < len(prompt) <= 1024 for prompt in many.prompts) and len(set(many.texts)) == 64
    assert one.texts[0] == many.texts[0] and "\n\nThe same code, with " in one.texts[0]
    assert all(len(set(prompt)) < 400 for prompt in many.prompts), "words come again"
    (short,) = load_workloads(["edits_b8"], scale=0.25, max_len=64)
    assert all(20 < len(prompt) <= 64 for prompt in short.prompts) and len(short.texts[0]) < 300
    assert not any(work.texts for work in load_workloads())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown workload 'x': the workloads are latency_b1"):
        list(load_workloads(["x"]))


def test_models() -> None:
    assert "qwen3-0.6b" in model_names()
    assert (model_folder("qwen3-0.6b") / "config.json").is_file()
    with pytest.raises(ValueError, match="unknown benchmark model 'y'"):
        model_folder("y")


class FakeLLM:
    def __init__(self, num_missing: int = 0) -> None:
        self.num_missing, self.calls = num_missing, []

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, inputs: Any, params: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append([i["prompt_token_ids"] for i in inputs])
        counts = [p["max_tokens"] - self.num_missing for p in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * n)]) for n in counts]


def test_the_prefix_cache_is_emptied_before_each_run() -> None:
    llm, work = FakeLLM(), Workload(name="w", prompts=[[1], [2, 3]], outputs=[4, 5])
    row = fastest_run(llm, dict, work, 2)
    assert llm.calls == ["reset", work.prompts] * 2
    assert (row["workload"], row["requests"], row["input_tokens"], row["output_tokens"]) == ("w", 2, 3, 9)


def test_an_engine_that_stops_early_is_not_measured() -> None:
    with pytest.raises(ValueError, match="8 tokens came out, 9 were asked for"):
        fastest_run(FakeLLM(1), dict, Workload(name="w", prompts=[[1]], outputs=[9]), 1)

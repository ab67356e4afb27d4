"""Decode steps of few rows with attention from the projection on in one kernel, beside the chain of two kernels.

    python tools/measure_launches.py [--models qwen3-0.6b,qwen3-8b,...] [--requests 1,4,16] [--runs 3] [--prompt 512]
                                     [--tokens 320] [--device cuda] [--changes JSON] [--json FILE] [--without-traces]

Dummy weights. One engine per model: its CUDA graphs are captured once with `chain` and once with `attention` in all
layers that can take it, whatever the plan has chosen (`kernels/joined/choice.py`), and the variants take turns. The
time of a step is the difference of requests of --tokens and of 64 tokens: prompts and starts are not counted. The
median of the runs counts, and the extremes are printed. Then the launches of a step and the time in its kernels are
traced.

Checks: all runs of a variant give the same tokens. Tokens of the variants are compared; sums have other orders, so a
near tie may turn a token, after which a request's tokens differ. --changes: keys of config.json to replace.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.profile import Event, where_time_goes
from quire.bench.workload import model_folder
from quire.kernels.joined import MOST_ROWS, decode_attention
from quire.layers.attention import Attention

MODELS = "qwen3-0.6b,qwen3-8b,qwen3-8b-fp8,qwen3-8b-awq,qwen3-30b-a3b,qwen3-30b-a3b-fp8,deepseek-v2-lite"
FEW = 64  # tokens of the shorter requests
CHAIN, ATTENTION = "chain", "attention"
ROWS = {CHAIN: range(0), ATTENTION: range(1, MOST_ROWS + 1)}  # of the steps that take the joined kernel
Tokens = list[list[int]]


def main() -> int:
    """Print the measurements of each model. Return 1 if a variant gave other tokens the second time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--device", default="cuda")
    for name, number in (("--prompt", 512), ("--tokens", 320), ("--runs", 3)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--changes", default={}, type=json.loads)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--without-traces", action="store_true")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in asked.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            raw = json.loads((model_folder(model) / "config.json").read_text()) | asked.changes
            Path(folder, "config.json").write_text(json.dumps(raw))
            rows += measure(asked, model, folder)
        gc.collect()
        if asked.json is not None:
            asked.json.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows), flush=True)
    return 0 if all(row["steady"] for row in rows) else 1


def measure(asked: argparse.Namespace, name: str, folder: str) -> list[dict[str, Any]]:
    """Measure a model. Return a row of numbers for each number of requests and variant."""
    counts, rows = [int(count) for count in asked.requests.split(",")], []
    start = time.perf_counter()
    with LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_num_seqs=max(counts),
        max_model_len=asked.prompt + asked.tokens + 16,
        device=asked.device,
        use_tqdm_on_load=False,
    ) as llm:
        choose, variants = captured(llm)
        print(f"{name}: {', '.join(variants)}; made in {time.perf_counter() - start:.1f} s", flush=True)
        for count in counts:
            times: dict[str, list[float]] = {variant: [] for variant in variants}
            texts: dict[str, list[Tokens]] = {variant: [] for variant in variants}
            for turn in range(1 + asked.runs):
                for variant in variants if turn % 2 else reversed(variants):
                    choose(variant)
                    (_, short), (tokens, long) = (run(llm, count, asked.prompt, own) for own in (FEW, asked.tokens))
                    times[variant].append((long - short) / (asked.tokens - FEW))
                    texts[variant].append(tokens)
            chain = statistics.median(times[CHAIN][1:])
            for variant in variants:
                rows.append(row_of(llm, name, count, variant, times[variant][1:], texts[variant]))
                rows[-1] |= {"times": chain * 1e3 / rows[-1]["ms"], "equal": equal(texts[CHAIN][0], texts[variant][0])}
                print("  ".join(f"{key} {value}" for key, value in rounded(rows[-1]).items()), flush=True)
            for variant in () if asked.without_traces else variants:
                choose(variant)
                trace(llm, f"{name}, {count} requests, {variant}", count, asked.prompt)
    return rows


def row_of(llm: LLM, name: str, count: int, variant: str, times: list[float], texts: list[Tokens]) -> dict[str, Any]:
    """Return the numbers of a variant."""
    middle, layers = statistics.median(times), len(llm.engine.worker.model.layers)
    return {
        "model": name,
        "requests": count,
        "variant": variant,
        "ms": middle * 1e3,
        "least": min(times) * 1e3,
        "most": max(times) * 1e3,
        "us_a_layer": middle * 1e6 / layers,
        "tokens_per_s": count / middle,
        "steady": all(text == texts[0] for text in texts),
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers as they are printed."""
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def captured(llm: LLM) -> tuple[Callable[[str], None], list[str]]:
    """Capture the CUDA graphs with each variant. Return a function that chooses a variant, and the variants' names.

    An engine that captures nothing, as on a CPU, runs each variant as it is chosen.
    """
    runner = llm.engine.worker
    every = [getattr(layer, "attention", None) for layer in runner.model.layers]
    own = [one for one in every if isinstance(one, Attention) and one.growth is None and not one.values]
    variants = [CHAIN, ATTENTION] if own and "heads" in runner.model.kernels.features("attention") else [CHAIN]
    graphs, hidden = getattr(runner.recorder, "_graphs", {}), runner.programs._hidden
    made = {}

    def switch(variant: str) -> None:
        for layer in own:
            layer.joined, layer.joined_rows = decode_attention, ROWS[variant]

    for variant in variants:
        switch(variant)
        if graphs:
            with torch.inference_mode():
                for _, work in runner.programs.recordings(runner.recorder.shapes()):
                    work()  # compiles what is captured
            runner.warm_up()
        made[variant] = dict(graphs), dict(hidden)

    def choose(variant: str) -> None:
        switch(variant)
        for kept, mine in zip((graphs, hidden), made[variant], strict=True):
            kept.clear()
            kept.update(mine)

    return choose, variants


def run(llm: LLM, count: int, prompt: int, tokens: int) -> tuple[Tokens, float]:
    """Return the tokens of so many requests, none of them known, and the seconds."""
    llm.reset_prefix_cache()
    draw = random.Random(count)
    prompts = [{"prompt_token_ids": [draw.randrange(1000, 30000) for _ in range(prompt)]} for _ in range(count)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [list(one.outputs[0].token_ids) for one in outputs], seconds


def equal(ours: Tokens, theirs: Tokens) -> int:
    """Return the number of tokens of all requests that are equal before the first that differs."""
    pairs = [list(zip(*pair, strict=True)) for pair in zip(ours, theirs, strict=True)]
    return min(next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs)


def trace(llm: LLM, words: str, count: int, prompt: int) -> None:
    """Print the launches of a step and the kernels in which it spends most of its time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA] if torch.cuda.is_available() else None) as traced:
        run(llm, count, prompt, FEW)
    found = where_time_goes(
        Event(event.name(), event.start_ns(), event.duration_ns())
        for event in traced.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
    kernels: list[dict[str, Any]] = found["kernels"][:14]
    listed = "; ".join(f"{one['kernel'][:28]} {one['calls']} x {one['us']}" for one in kernels)
    print(f"{words}: traced step {found['steps']}; kernels (calls x us): {listed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

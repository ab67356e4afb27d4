"""Decode steps of few rows with norm, router and choice of experts in one kernel, beside those with three.

    python tools/measure_launches.py [--models qwen3-30b-a3b,qwen3-30b-a3b-fp8,deepseek-v2-lite] [--requests 1,4,8,16]
                                     [--runs 5] [--prompt 128] [--tokens 576] [--device cuda] [--changes JSON]

Dummy weights. One engine per model: its CUDA graphs are captured once with each chain, and the two take turns. The time
of a step is the difference of requests of --tokens and of 64 tokens: prompts and starts are not counted. The median of
the runs counts, and the extremes are printed. Then the launches of a step and the time in its kernels are traced.

Checks: both runs of a chain give the same tokens. Tokens of the two chains are compared; sums have other orders, so a
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
from quire.kernels.routing import triton_normed

FEW = 64  # tokens of the shorter requests
CHAINS = ("three kernels", "one kernel")
Tokens = list[list[int]]


def main() -> int:
    """Print the measurements of each model. Return 1 if a chain gave other tokens the second time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b,qwen3-30b-a3b-fp8,deepseek-v2-lite")
    parser.add_argument("--requests", default="1,4,8,16")
    parser.add_argument("--device", default="cuda")
    for name, number in (("--prompt", 128), ("--tokens", 576), ("--runs", 5)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--changes", default={}, type=json.loads)
    asked = parser.parse_args()
    steady = True
    for model in asked.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            raw = json.loads((model_folder(model) / "config.json").read_text()) | asked.changes
            Path(folder, "config.json").write_text(json.dumps(raw))
            steady = measure(asked, model, folder) and steady
        gc.collect()
    return 0 if steady else 1


def measure(asked: argparse.Namespace, name: str, folder: str) -> bool:
    """Measure a model. Return True if every chain gave the same tokens each time."""
    counts, steady = [int(count) for count in asked.requests.split(",")], True
    with LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_num_seqs=max(16, *counts),
        max_model_len=asked.prompt + asked.tokens + 16,
        device=asked.device,
        use_tqdm_on_load=False,
    ) as llm:
        choose = captured(llm)
        for count in counts:
            times: dict[str, list[float]] = {chain: [] for chain in CHAINS}
            texts: dict[str, list[Tokens]] = {chain: [] for chain in CHAINS}
            for turn in range(1 + asked.runs):
                for chain in CHAINS if turn % 2 else reversed(CHAINS):
                    choose(chain)
                    (_, short), (tokens, long) = (run(llm, count, asked.prompt, own) for own in (FEW, asked.tokens))
                    times[chain].append((long - short) / (asked.tokens - FEW))
                    texts[chain].append(tokens)
            before, after = (statistics.median(times[chain][1:]) for chain in CHAINS)
            for chain in CHAINS:
                own = times[chain][1:]
                words = ", ".join(f"{1000 * one:.4f}" for one in (min(own), statistics.median(own), max(own)))
                same = all(text == texts[chain][0] for text in texts[chain])
                steady = steady and same
                again = "the same tokens each time" if same else "OTHER TOKENS WHEN RUN AGAIN"
                rate = count / statistics.median(own)
                print(f"{name}, {count} requests, {chain}: {words} ms a step, {rate:.1f} tokens/s, {again}", flush=True)
            print(f"{name}, {count} requests: {before / after:.4f} times as fast; {alike(texts)}", flush=True)
            for chain in CHAINS:
                choose(chain)
                trace(llm, f"{name}, {count} requests, {chain}", count, asked.prompt)
    return steady


def captured(llm: LLM) -> Callable[[str], None]:
    """Capture the CUDA graphs with each chain. Return a function that makes an idle engine run the named chain."""
    runner = llm.engine.worker
    graphs, hidden = runner.recorder._graphs, runner.programs._hidden
    made = {}
    for chain in CHAINS:
        triton_normed.ENABLED = chain == CHAINS[1]
        runner.warm_up()
        made[chain] = dict(graphs), dict(hidden)

    def choose(chain: str) -> None:
        triton_normed.ENABLED = chain == CHAINS[1]
        for kept, own in zip((graphs, hidden), made[chain], strict=True):
            kept.clear()
            kept.update(own)

    return choose


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


def alike(texts: dict[str, list[Tokens]]) -> str:
    """Say how many tokens of the two chains are equal before the first that differs."""
    pairs = list(zip(*(texts[chain][0] for chain in CHAINS), strict=True))
    firsts = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    return f"tokens of the two chains are equal up to {firsts} of {len(pairs[0][0])}"


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

"""Seconds of decoding and of prompts by the code of transformers beside a native family, with random weights.

    python tools/measure_foreign.py [--model qwen3-0.6b] [--batches 1,64] [--tokens 64] [--prompt 512] [--rounds 3]
                                    [--threads 1]

The models are those of `quire/bench/models`. Both engines are made first and take turns, so that another load of the
machine meets both; the fastest round counts. The share of native is its seconds over those of the other.
"""

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

import quire.bench
from quire import LLM, SamplingParams

IMPLS = ("quire", "transformers")


def main() -> None:
    """Print a line for each number of requests, and one for a prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    folder = Path(quire.bench.__file__).parent / "models" / asked.model
    gpu, engines = torch.cuda.is_available(), {}
    room = {"kv_cache_memory_bytes": 16 << 30 if gpu else 1 << 29} | ({} if gpu else {"num_threads": asked.threads})
    clock = time.perf_counter if gpu else time.process_time
    for impl in IMPLS:
        began = time.perf_counter()
        engines[impl] = LLM(
            str(folder), model_impl=impl, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, **room
        )
        print(f"{impl}: started in {time.perf_counter() - began:.1f} s")
        gc.collect()
    for batch in map(int, asked.batches.split(",")):
        compare(f"{batch} requests", engines, clock, asked.rounds, batch, 16, asked.tokens)
    compare(f"a prompt of {asked.prompt}", engines, clock, asked.rounds, 1, asked.prompt, 1)


def compare(
    words: str, engines: dict[str, LLM], clock: Callable[[], float], rounds: int, batch: int, prompt: int, tokens: int
) -> None:
    """Print the seconds of a run by each engine, and the share."""
    best = dict.fromkeys(engines, float("inf"))
    for turn in range(rounds + 1):  # the first one warms up
        for impl, llm in engines.items():
            llm.reset_prefix_cache()
            prompts = [[(7 * i + j) % 1000 + 5 for j in range(prompt)] for i in range(batch)]
            began = clock()
            llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), use_tqdm=False)
            if turn:
                best[impl] = min(best[impl], clock() - began)
    native, foreign = (best[impl] for impl in IMPLS)
    print(f"{words}: native {native:.3f} s, transformers {foreign:.3f} s, share {native / foreign:.3f}", flush=True)


if __name__ == "__main__":
    main()

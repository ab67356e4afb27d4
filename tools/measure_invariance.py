"""The cost of --batch-invariant: time of decode steps and of prompts, with and without it, in turn.

    python tools/measure_invariance.py [--model qwen3-8b] [--device cuda] [--batches 1,64,256] [--context 1024]
                                       [--prompts 8] [--prompt 2048] [--runs 5] [--rounds 2]

--model: a configuration of `quire bench`, or a folder. Dummy weights. A decode step is timed by the difference of
answers of 192 and 64 tokens, so prompts and starts are not counted; prompts by requests for one token. The median of
all runs counts, and the extremes are printed. tests/gpu/test_batch_invariance.py compares bits.
"""

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder

SHORT, LONG = 64, 192  # tokens of the answers
Times = dict[str, list[float]]  # cell -> seconds


def main() -> None:
    """Print a line for each cell and engine, and the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--model", "qwen3-8b"), ("--device", "cuda"), ("--batches", "1,64,256")):
        parser.add_argument(name, default=value)
    numbers = ("--context", 1024), ("--prompts", 8), ("--prompt", 2048), ("--runs", 5), ("--rounds", 2)
    for name, number in numbers:
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    found: dict[bool, Times] = {False: {}, True: {}}
    for _ in range(asked.rounds):
        for invariant in (False, True):
            for cell, times in measure(asked, invariant).items():
                found[invariant].setdefault(cell, []).extend(times)
    for cell, plain in found[False].items():
        middle = [statistics.median(one) for one in (plain, found[True][cell])]
        for name, times in (("plain", plain), ("batch-invariant", found[True][cell])):
            words = " ".join(f"{1000 * one:.3f}" for one in (min(times), statistics.median(times), max(times)))
            print(f"{cell}: {name} {words} ms (least, median, most)", flush=True)
        print(f"{cell}: --batch-invariant costs {100 * (middle[1] / middle[0] - 1):+.1f}%", flush=True)


def measure(asked: argparse.Namespace, invariant: bool) -> Times:
    """Return the seconds of each cell in an engine with or without the option."""
    batches = [int(count) for count in asked.batches.split(",")]
    with LLM(
        asked.model if "/" in asked.model else str(model_folder(asked.model)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        device=asked.device,
        max_num_seqs=max(64, *batches),
        max_model_len=max(asked.context + LONG, asked.prompt) + 16,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        batch_invariant=invariant,
    ) as llm:
        found: Times = {}
        for count in batches:
            cell, steps = f"decode, batch {count}, context {asked.context}", LONG - SHORT
            for _ in range(1 + asked.runs):
                short, long = (timed(llm, count, asked.context - SHORT, tokens) for tokens in (SHORT, LONG))
                found.setdefault(cell, []).append((long - short) / steps)
        cell = f"prefill, {asked.prompts} prompts of {asked.prompt}"
        for _ in range(1 + asked.runs):
            found.setdefault(cell, []).append(timed(llm, asked.prompts, asked.prompt, 1))
    gc.collect()
    return {cell: times[1:] for cell, times in found.items()}


def prompts_of(count: int, length: int) -> list[Any]:
    """Return prompts of random tokens."""
    random = np.random.default_rng(length)
    return [{"prompt_token_ids": random.integers(10, 1000, length).tolist()} for _ in range(count)]


def timed(llm: LLM, count: int, length: int, tokens: int) -> float:
    """Return the seconds in which a batch is answered."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = prompts_of(count, length)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

"""Weights in host memory (--cpu-offload-gb): time of a decode step and of a prompt, beside what no engine can beat.

    python tools/measure_offload.py [--model qwen3-8b] [--gb 0,4,8] [--batches 1,64] [--prompt 8192] [--runs 5]

--model: a configuration of `quire bench`, or a folder. Dummy weights, CUDA graphs. The first of --gb must be 0. A
decode step is timed by the difference of answers of 192 and 64 tokens. The floor of a step is the longer of the same
step with all weights on the device, and the bytes in host memory over the rate at which one copy of 1 GiB of locked
memory runs.

Before a number counts: tokens are those of weights on the device, the memory of the device shrank by the bytes that the
plan says (3% and 32 MiB of difference pass), graphs were replayed, and no step takes less than 97% of the time of its
copies, because then bytes did not come. A check that fails ends the run.
"""

import argparse
import gc
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder
from quire.kernels.layer_copies import HostBlock

SHORT, LONG = 64, 192  # tokens of the answers
CONTEXT = 512  # tokens of a prompt of a decode


class Found(NamedTuple):
    """Measurements of an engine, and its answers.

    seconds    cell -> seconds of a step, the median
    copied     bytes in host memory, and those that left the device
    """

    seconds: dict[str, float]
    tokens: list[list[int]]
    allocated: int
    copied: int
    saved: int


def main() -> None:
    """Print a line for each cell of each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--model", "qwen3-8b"), ("--gb", "0,4,8"), ("--batches", "1,64")):
        parser.add_argument(name, default=value)
    for name, number in (("--prompt", 8192), ("--runs", 5)):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    sizes = [float(size) for size in asked.gb.split(",")]
    if sizes[0]:
        parser.error("the first size must be 0: the others are compared with it")
    rate = link_rate()
    print(f"locked memory of the host to the GPU: {rate / 1e9:.1f} GB/s", flush=True)
    plain = measure(asked, 0.0)
    for cell, seconds in plain.seconds.items():
        print(f"{cell}, all weights on the device: {1e3 * seconds:.2f} ms", flush=True)
    for size in sizes[1:]:
        compare(size, measure(asked, size), plain, rate)


def compare(size: float, found: Found, plain: Found, rate: float) -> None:
    """Check an engine against the one with all weights on the device, and print its times beside their floors."""
    assert found.tokens == plain.tokens, f"{size:g} GiB: other tokens"
    left = plain.allocated - found.allocated
    assert abs(left - found.saved) < 0.03 * found.saved + (32 << 20), f"{left:,} bytes left, not {found.saved:,}"
    print(f"{size:g} GiB: {found.copied / 2**30:.2f} in host memory, {left / 2**30:.2f} less on the device", flush=True)
    copies = found.copied / rate
    for cell, seconds in found.seconds.items():
        floor = max(plain.seconds[cell], copies)
        print(
            f"{cell}, {size:g} GiB in host memory: {1e3 * seconds:.2f} ms; floor {1e3 * floor:.2f} ms (copies "
            f"{1e3 * copies:.2f}), {floor / seconds:.1%} of the time",
            flush=True,
        )
        assert seconds > 0.97 * copies, f"{cell}: faster than its bytes can come"


def link_rate() -> float:
    """Return the bytes per second of one copy of 1 GiB from locked memory, the best of ten."""
    device = torch.device("cuda", torch.cuda.current_device())
    weight = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    ((source, target),) = HostBlock([weight], device).lie_in(torch.empty(1 << 30, dtype=torch.uint8, device=device))
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return (1 << 30) / min(times)


def measure(asked: argparse.Namespace, size: float) -> Found:
    """Start an engine with `size` GiB of weights in host memory, and time it."""
    gc.collect()
    torch.cuda.empty_cache()
    batches, before = [int(count) for count in asked.batches.split(",")], torch.cuda.memory_allocated()
    start = time.perf_counter()
    with LLM(
        asked.model if "/" in asked.model else str(model_folder(asked.model)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=max(8, *batches),
        max_num_batched_tokens=asked.prompt,
        max_model_len=max(CONTEXT + LONG, asked.prompt) + 16,
        kv_cache_memory_bytes=max(batches) * (CONTEXT + LONG + 256) * (192 << 10) + (4 << 30),
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        cpu_offload_gb=size,
    ) as llm:
        worker, seconds = llm.engine.worker, dict[str, float]()
        print(f"{size:g} GiB: started in {time.perf_counter() - start:.1f} s", flush=True)
        allocated, layers = torch.cuda.memory_allocated() - before, worker.model.streamed
        copied = saved = 0
        if layers is not None:
            copied = sum(block.num_bytes for one in layers._layers.values() for block in one.blocks)
            saved = copied - sum(map(len, layers.slots))
        assert (layers is not None) == (size > 0)
        tokens = [list(one.outputs[0].token_ids) for one in answer(llm, 4, 40, 24)]
        for count in batches:
            times = [step(llm, count) for _ in range(1 + asked.runs)]
            seconds[f"decode of {count}"] = statistics.median(times[1:])
        times = [timed(llm, 1, asked.prompt - 1, 1) for _ in range(1 + asked.runs)]
        seconds[f"prompt of {asked.prompt}"] = statistics.median(times[1:])
        assert worker.recorder.counts["replayed"] > LONG, "no graphs were replayed"
    return Found(seconds, tokens, allocated, copied, saved)


def step(llm: LLM, count: int) -> float:
    """Return the seconds of a decode step of so many requests."""
    return (timed(llm, count, CONTEXT, LONG) - timed(llm, count, CONTEXT, SHORT)) / (LONG - SHORT)


def timed(llm: LLM, count: int, length: int, tokens: int) -> float:
    """Return the seconds in which requests are answered."""
    start = time.perf_counter()
    answer(llm, count, length, tokens)
    return time.perf_counter() - start


def answer(llm: LLM, count: int, length: int, tokens: int) -> list[Any]:
    """Answer so many prompts of random tokens."""
    random = np.random.default_rng(length)
    prompts: list[Any] = [{"prompt_token_ids": random.integers(10, 1000, length).tolist()} for _ in range(count)]
    return llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), use_tqdm=False)


if __name__ == "__main__":
    main()

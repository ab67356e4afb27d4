"""Conversations of several turns, whose KV cache does not fit on the device: times to first tokens, and throughput.

    python tools/measure_turns.py [MODEL] [--engine quire|vllm] [--device cuda] [--talks 200] [--together 50]
                                  [--turns 8] [--first 0] [--new 200] [--output 64] [--cache 20] [--host 80]
                                  [--policy lazy]

MODEL is a name of `quire bench`, with dummy weights. --together conversations are answered at a time, all conversations
once before any of them goes on: the cache of the others leaves the device meanwhile. --first: tokens in front of the
first turn. --cache, --host: GB of KV cache on
the device and in host memory (vLLM: its own offloading); --host 0 turns the host tier off. --policy is Quire's.
"""

import argparse
import importlib
import random
import statistics
import time
from typing import Any

from quire.bench.workload import HIGH_ID, LOW_ID, model_folder


def main() -> None:
    """Print a line per turn, and the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--engine", default="quire", choices=("quire", "vllm"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--policy", default="lazy", choices=("lazy", "write_through"))
    for name, number in (
        ("--talks", 200),
        ("--together", 50),
        ("--turns", 8),
        ("--first", 0),
        ("--new", 200),
        ("--output", 64),
        ("--cache", 20),
        ("--host", 80),
    ):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    module = importlib.import_module(asked.engine)
    llm = engine(module, asked)
    draw = random.Random(1)
    talks: list[list[int]] = [[] for _ in range(asked.talks)]
    params = module.SamplingParams(max_tokens=asked.output, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [LOW_ID] * 64}], params, use_tqdm=False)
    waits, whole = list[float](), 0.0
    for turn in range(asked.turns):
        took, firsts, cached = 0.0, list[float](), 0
        for at in range(0, asked.talks, asked.together):
            some = talks[at : at + asked.together]
            for talk in some:
                count = asked.new + (0 if turn else asked.first)
                talk += [draw.randrange(LOW_ID, HIGH_ID) for _ in range(count)]
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": talk} for talk in some], params, use_tqdm=False)
            took += time.perf_counter() - start
            for talk, output in zip(some, outputs, strict=True):
                talk += output.outputs[0].token_ids
                firsts.append(wait(output.metrics))
                cached += output.num_cached_tokens or 0
        length = sum(map(len, talks)) / len(talks) - asked.output
        print(
            f"turn {turn}: prompts of {length:.0f} tokens, {cached / len(talks):.0f} of them cached; first tokens "
            f"after {1000 * statistics.mean(firsts):.0f} ms (median {1000 * statistics.median(firsts):.0f}); "
            f"{took:.2f} s",
            flush=True,
        )
        waits, whole = waits + firsts, whole + took
    made = asked.talks * asked.turns * asked.output
    print(
        f"{asked.engine}: first tokens after {1000 * statistics.mean(waits):.1f} ms in the mean, "
        f"{1000 * statistics.median(waits):.1f} in the median; {made / whole:.0f} tokens/s, "
        f"{whole:.2f} s",
        flush=True,
    )


def engine(module: Any, asked: argparse.Namespace) -> Any:
    """Return an engine whose KV cache has its limits."""
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_num_seqs": 256,
        "max_model_len": asked.first + asked.turns * (asked.new + asked.output) + 64,
        "kv_cache_memory_bytes": asked.cache * 10**9,
    }
    if asked.engine == "quire":
        options |= {
            "device": asked.device,
            "kv_offload_gb": asked.host * 1e9 / 2**30,
            "kv_offload_policy": asked.policy,
            "use_tqdm_on_load": False,
        }
    else:
        options |= {"disable_log_stats": False, "seed": 0}
        options |= {"kv_offloading_size": asked.host * 1e9 / 2**30} if asked.host else {}
    return module.LLM(model=str(model_folder(asked.model)), **options)


def wait(metrics: Any) -> float:
    """Return the seconds from the arrival of a request to its first token."""
    if hasattr(metrics, "first_token_latency"):
        return float(metrics.first_token_latency)
    return float(metrics.first_token_time - metrics.arrival_time)


if __name__ == "__main__":
    main()

"""Seconds that an engine on a GPU takes to sleep and to wake up, and the share of its memory that it gives back.

    python tools/measure_sleep.py [MODEL] [--rounds 3] [--utilization 0.9] [--small]

MODEL is a name of `quire bench` (default: qwen3-8b, 16 GB in bfloat16) or a folder, with dummy weights. Memory is that
of the driver (cuMemGetInfo), and 100% are the weights and the KV cache as the engine's plan has them. Each round
sleeps at level 1, wakes up, and compares the tokens of a few prompts with those before:
a speed counts only if they are equal.
--small: the bundled model with a KV cache of 256 MiB, to see that the command works.
"""

import argparse
import sys
import time

import torch

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder, model_names

PROMPTS = [{"prompt_token_ids": [(31 * i + s) % 900 + 10 for i in range(200)]} for s in range(4)]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


def free() -> int:
    """Return the free bytes of the GPU, by its driver."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def main() -> int:
    """Print a line for each round. Returns 1 when tokens differ or less than 95% came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    options = {"gpu_memory_utilization": asked.utilization, "load_format": "dummy", "skip_tokenizer_init": True}
    options |= {"max_model_len": 4096, "max_num_seqs": 64}
    model = str(model_folder(asked.model)) if asked.model in model_names() else asked.model
    if asked.small:
        model, options = "", {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 1024}
    before = free()
    with LLM(model, device="cuda", enable_sleep_mode=True, **options) as llm:
        held = llm.engine.weight_bytes + llm.engine.memory.kv_bytes
        expected = tokens(llm)
        print(f"awake: {before - free():,} bytes of the GPU, of these {held:,} of weights and KV cache")
        good = True
        for number in range(asked.rounds):
            awake = free()
            began = time.perf_counter()
            llm.sleep(1)
            slept = time.perf_counter()
            share = (free() - awake) / held
            asleep = time.perf_counter()
            llm.wake_up()
            torch.cuda.synchronize()
            woken = time.perf_counter()
            same = tokens(llm) == expected
            good = good and same and (share >= 0.95 or asked.small)
            print(
                f"round {number}: asleep after {slept - began:.2f} s, {share:.1%} given back; awake after "
                f"{woken - asleep:.3f} s, first answer after {time.perf_counter() - woken:.2f} s more, tokens "
                f"{'equal' if same else 'DIFFER'}",
                flush=True,
            )
    return 0 if good else 1


def tokens(llm: LLM) -> list[list[int]]:
    """Return greedy answers."""
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


if __name__ == "__main__":
    sys.exit(main())

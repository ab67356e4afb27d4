"""Tokens per second when a given mean number of tokens comes out of a step with drafts (synthetic acceptance).

    python tools/measure_acceptance.py [MODEL] [--engine quire|vllm] [--device cuda] [--method ngram] [--drafts 3]
                                       [--lengths 1.5,2,3] [--requests 1,8,64] [--prompt 512] [--tokens 256]

MODEL is a name of `quire bench`, with dummy weights. Prompts repeat a period of 48 tokens, so that n-grams are found.
The faster of three runs counts, prompts included. Length 0: without drafts. A new engine for each length.
"""

import argparse
import gc
import importlib
import random
import time
from typing import Any

from quire.bench.workload import HIGH_ID, LOW_ID, model_folder


def main() -> None:
    """Print a line for each length and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--engine", default="quire", choices=("quire", "vllm"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--lengths", default="1.5,2,3")
    parser.add_argument("--requests", default="1,8,64")
    for name, number in (("--drafts", 3), ("--prompt", 512), ("--tokens", 256)):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    module = importlib.import_module(asked.engine)
    for length in map(float, asked.lengths.split(",")):
        start = time.perf_counter()
        llm = engine(module, asked, length)
        print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
        params = module.SamplingParams(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True)
        for count in map(int, asked.requests.split(",")):
            seconds = min(run(llm, params, count, asked) for _ in range(3))
            print(f"{asked.engine} {asked.model}, {length:g} tokens a step, {count} requests: "
                  f"{count * asked.tokens / seconds:.1f} tokens/s", flush=True)
        if asked.engine == "quire":
            llm.close()
        del llm
        gc.collect()


def engine(module: Any, asked: argparse.Namespace, length: float) -> Any:
    """Return an engine of which so many tokens come out of a step."""
    drafts = {"method": asked.method, "num_speculative_tokens": asked.drafts, "prompt_lookup_min": 1,
              "prompt_lookup_max": 4, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0, "max_num_seqs": 64,
               "max_model_len": asked.prompt + asked.tokens + 16, "speculative_config": drafts if length else None}
    if asked.engine == "quire":
        options |= {"device": asked.device, "use_tqdm_on_load": False}
    return module.LLM(model=str(model_folder(asked.model)), **options)


def run(llm: Any, params: Any, count: int, asked: argparse.Namespace) -> float:
    """Return the seconds of a run with so many requests, none of them known."""
    llm.reset_prefix_cache()
    draw, prompts = random.Random(count), []
    for _ in range(count):
        period = [draw.randrange(LOW_ID, HIGH_ID) for _ in range(48)]
        prompts.append({"prompt_token_ids": (period * -(-asked.prompt // len(period)))[: asked.prompt]})
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == asked.tokens for one in outputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

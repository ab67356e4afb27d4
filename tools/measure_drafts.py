"""Tokens per second with n-gram drafts and without, of random texts and of texts that repeat themselves.

    python tools/measure_drafts.py [MODEL] [--device cuda] [--drafts 0,3,auto] [--requests 1,8,64] [--prompt 512]
                                   [--tokens 256] [--texts random,repeating]

MODEL is a name of `quire bench`, or a folder, with dummy weights. Random: random tokens at temperature 1, so that a
guess is hardly ever made. Repeating: a prompt with a period of 48 tokens, and a greedy answer, which falls into a loop.
The faster of two runs counts, prompts included.
"""

import argparse
import random
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder


def main() -> None:
    """Print a line for each number of drafts, text and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--drafts", default="0,3,auto")
    parser.add_argument("--requests", default="1,8,64")
    parser.add_argument("--texts", default="random,repeating")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    asked = parser.parse_args()
    for drafts in asked.drafts.split(","):
        number = drafts if drafts == "auto" else int(drafts)
        given = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
        folder = asked.model if Path(asked.model).is_dir() else str(model_folder(asked.model))
        with LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            device=asked.device,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            max_model_len=asked.prompt + asked.tokens,
            speculative_config=given if number else None,
        ) as llm:
            for text in asked.texts.split(","):
                for count in map(int, asked.requests.split(",")):
                    seconds, steps = measure(llm, count, asked, repeating=text == "repeating")
                    made = count * asked.tokens
                    print(
                        f"{asked.model}, drafts {drafts}, {text}, {count} requests: "
                        f"{made / seconds:.1f} tokens/s, {1000 * seconds / steps:.3f} ms a step, "
                        f"{made / steps:.2f} tokens a step",
                        flush=True,
                    )


def measure(llm: LLM, count: int, asked: argparse.Namespace, *, repeating: bool) -> tuple[float, int]:
    """Return seconds and steps of the faster of two runs."""
    draw, most = random.Random(1), llm.engine.args.vocab_size
    prompts = []
    for _ in range(count):
        period = [draw.randrange(most) for _ in range(48 if repeating else asked.prompt)]
        prompts.append((period * -(-asked.prompt // len(period)))[: asked.prompt])
    params = SamplingParams(max_tokens=asked.tokens, temperature=0.0 if repeating else 1.0, seed=3, ignore_eos=True)
    found = []
    for _ in range(2):
        llm.reset_prefix_cache()
        first, start = llm.engine.core._step, time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        found.append((time.perf_counter() - start, llm.engine.core._step - first))
    return min(found)


if __name__ == "__main__":
    main()

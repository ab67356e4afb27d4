"""Time to the first token of a prompt of texts that were cached alone, by the part that is computed again.

    python tools/measure_blend.py [MODEL] [--device cuda] [--texts 8] [--tokens 2000] [--question 64]
                                  [--ratios none,0,0.15,0.3,1] [--gb 0] [--runs 3]

MODEL is a folder, or a name of `quire bench`, with dummy weights. The texts come in a new order in every
run. "none" reuses nothing.
--gb: GiB of host memory; the texts are then evicted from the device before each run, and come from there.
"""

import argparse
import random
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
DRAW = random.Random(1)


def main() -> None:
    """Print a line for each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ratios", default="none,0,0.15,0.3,1")
    for name, number in (("--texts", 8), ("--tokens", 2000), ("--question", 64), ("--gb", 0), ("--runs", 3)):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    whole = asked.texts * asked.tokens + asked.question
    tiers = {"kv_offload_gb": asked.gb, "kv_offload_policy": "write_through"} if asked.gb else {}
    with LLM(
        folder(asked.model),
        load_format="dummy",
        dtype="bfloat16",
        device=asked.device,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=whole + 128,
        block_size=16,
        enable_cache_blend=True,
        num_gpu_blocks_override=5 * whole // 16,
        **tiers,
    ) as llm:
        texts = [draw(llm, asked.tokens) for _ in range(asked.texts)]
        for ratio in asked.ratios.split(","):
            found = [first_token(llm, texts, ratio, asked) for _ in range(asked.runs + 1)][1:]
            seconds, cached = min(found)
            print(
                f"{asked.model}, {asked.texts} texts of {asked.tokens} tokens, ratio {ratio}"
                f"{', from host memory' if asked.gb else ''}: {1000 * seconds:.1f} ms, {cached} tokens reused",
                flush=True,
            )


def folder(model: str) -> str:
    """Return the folder of a model."""
    return model if Path(model).is_dir() else str(model_folder(model))


def draw(llm: LLM, length: int) -> list[int]:
    """Return random tokens."""
    return [DRAW.randrange(llm.engine.args.vocab_size) for _ in range(length)]


def first_token(llm: LLM, texts: list[list[int]], ratio: str, asked: argparse.Namespace) -> tuple[float, int]:
    """Return the seconds to the first token of the texts in a new order, and the tokens that were reused."""
    llm.reset_prefix_cache()
    params, prompt, chunks = ONE, draw(llm, 16), []
    if ratio != "none":
        llm.generate(texts, ONE, use_tqdm=False)
    if asked.gb and ratio != "none":
        length = asked.texts * asked.tokens
        llm.generate([draw(llm, length) for _ in range(6)], ONE, use_tqdm=False)
    for text in DRAW.sample(texts, len(texts)):
        chunks.append([len(prompt), len(prompt) + len(text)])
        prompt = prompt + text
    if ratio != "none":
        params = ONE.clone(kv_chunks=chunks, blend_ratio=float(ratio))
    prompt += draw(llm, asked.question)
    start = time.perf_counter()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return time.perf_counter() - start, output.num_cached_tokens or 0


if __name__ == "__main__":
    main()

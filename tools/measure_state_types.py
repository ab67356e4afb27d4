"""Error of states in bfloat16 against float32: log-probabilities of random models with the gated delta rule, on a CPU.

    python tools/measure_state_types.py [--tokens 2048] [--layers 12] [--hidden 512] [--longest 4096] [--threads 1]

A model has random weights. Half-lives of its heads' states go from 1 to --longest tokens, as far as decays are random
around them. Its own sampled text is scored by an engine with float32 states and one with bfloat16 ones. Printed, by
position: mean and maximum of |difference| of log-probabilities, over the 20 likeliest tokens of both, and the share of
positions with the same likeliest token. Then drafts by n-grams: accepted ones of those proposed, in greedy answers.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from quire import LLM, SamplingParams

TYPES = ("float32", "bfloat16")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


def write(folder: str, hidden: int, layers: int, longest: float) -> None:
    """Write a random checkpoint whose heads have half-lives from 1 to `longest` tokens."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=2048, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=hidden // 8, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=hidden // 8, linear_value_head_dim=hidden // 8,
        max_position_embeddings=8192, tie_word_embeddings=False, full_attention_interval=4,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config).eval()
    lives = longest ** torch.linspace(0, 1, 8)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.ndim == 2:
                one.copy_(torch.randn_like(one) * one.shape[1] ** -0.5 * (0.3 if "in_proj_a" in name else 1.0))
            elif name.endswith("A_log"):
                one.zero_()
            elif name.endswith("dt_bias"):  # softplus(dt_bias) = ln 2 / half-life
                one.copy_(torch.expm1(torch.tensor(0.5).log().neg() / lives).log())
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)


def scores(llm: LLM, text: list[int]) -> list[dict[int, float]]:
    """Return the log-probabilities of the likeliest tokens behind each prefix of a text."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=20, detokenize=False)
    found = llm.generate([text], params, use_tqdm=False)[0].prompt_logprobs
    return [{token: one.logprob for token, one in place.items()} for place in found[1:]]


def accepted(llm: LLM, prompts: list[list[int]]) -> str:
    """Answer prompts, and tell the share of drafts that were right."""
    params = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    _, drafts, *right = llm.engine.core.scheduler.drafts.totals
    return f"{sum(right):,} of {drafts:,}"


def main() -> None:
    """Print the numbers of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("layers", 12), ("hidden", 512), ("longest", 4096), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    found, drafts, text = dict[str, list[dict[int, float]]](), dict[str, str](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        write(folder, asked.hidden, asked.layers, asked.longest)
        options: dict[str, Any] = {
            "dtype": "float32", "skip_tokenizer_init": True, "num_threads": asked.threads, "max_num_seqs": 4,
            "use_tqdm_on_load": False, "kv_cache_memory_bytes": 1 << 28, "max_logprobs": 20, "max_model_len": 8192,
        }  # fmt: skip
        draw = random.Random(0)
        prompts = [[draw.randrange(2048) for _ in range(16)] * 3 for _ in range(4)]
        for dtype in TYPES:
            with LLM(folder, **options, mamba_ssm_cache_dtype=dtype) as llm:
                if not text:
                    params = SamplingParams(max_tokens=asked.tokens - 1, ignore_eos=True, seed=0, detokenize=False)
                    text = [1, *llm.generate([[1]], params, use_tqdm=False)[0].outputs[0].token_ids]
                found[dtype] = scores(llm, text)
            with LLM(folder, **options, mamba_ssm_cache_dtype=dtype, speculative_config=NGRAM) as llm:
                drafts[dtype] = accepted(llm, prompts)
    print(f"{Path(__file__).stem}: {asked.layers} layers of {asked.hidden}, half-lives to {asked.longest} tokens")
    places = list(zip(*found.values(), strict=True))
    edges = [0, 16, 64, 256, 1024, len(places)] if len(places) > 1024 else [0, 16, len(places)]
    for first, end in zip(edges, edges[1:], strict=False):
        apart = [abs(one[k] - other[k]) for one, other in places[first:end] for k in one.keys() & other.keys()]
        same = [max(one, key=one.__getitem__) == max(other, key=other.__getitem__) for one, other in places[first:end]]
        print(
            f"positions {first + 1:5,} to {end:5,}: mean {sum(apart) / len(apart):.1e}, max {max(apart):.1e}, "
            f"likeliest token the same in {sum(same) / len(same):.2%}"
        )
    print(f"n-gram drafts accepted: {', '.join(f'{dtype} {one}' for dtype, one in drafts.items())}")


if __name__ == "__main__":
    main()

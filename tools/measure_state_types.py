"""Error of states in bfloat16 against float32: log-probabilities of random models with the gated delta rule, on a CPU.

    python tools/measure_state_types.py [--tokens 2048] [--layers 12] [--hidden 512] [--longest 4096] [--threads 1]

A model has random weights. Half-lives of its heads' states go from 1 to --longest tokens, as far as decays are random
around them. Its own sampled text is scored by engines with float32 and with bfloat16 states, and as a yardstick by one
whose weights and activations are bfloat16 and its states float32. Printed, by position, against the first engine: mean
and maximum of |difference| of log-probabilities, over the 20 likeliest tokens of both, and the share of positions with
the same likeliest token, which is the share of drafts that stay right if all are right with float32 states.
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from quire import LLM, SamplingParams

ENGINES = {
    "float32": {"dtype": "float32"},
    "bfloat16 states": {"dtype": "float32", "mamba_ssm_cache_dtype": "bfloat16"},
    "bfloat16 weights and activations": {"dtype": "bfloat16"},
}


def write(folder: str, hidden: int, layers: int, longest: float) -> None:
    """Write a random checkpoint whose heads have half-lives from 1 to `longest` tokens."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=hidden // 8,
        linear_value_head_dim=hidden // 8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        full_attention_interval=4,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
    )
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


def tell(places: list[tuple[dict[int, float], dict[int, float]]]) -> None:
    """Print the differences of log-probabilities, by position."""
    edges = [0, *(one for one in (16, 64, 256, 1024) if one < len(places)), len(places)]
    for first, end in zip(edges, edges[1:], strict=False):
        apart = [abs(one[k] - other[k]) for one, other in places[first:end] for k in one.keys() & other.keys()]
        same = [max(one, key=one.__getitem__) == max(other, key=other.__getitem__) for one, other in places[first:end]]
        print(
            f"  positions {first + 1:5,} to {end:5,}: mean {sum(apart) / len(apart):.1e}, max {max(apart):.1e}, "
            f"likeliest token the same in {sum(same) / len(same):.1%}"
        )


def main() -> None:
    """Print the numbers of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("layers", 12), ("hidden", 512), ("longest", 4096), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    found, text = dict[str, list[dict[int, float]]](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        write(folder, asked.hidden, asked.layers, asked.longest)
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "num_threads": asked.threads,
            "max_num_seqs": 4,
            "use_tqdm_on_load": False,
            "kv_cache_memory_bytes": 1 << 28,
            "max_logprobs": 20,
            "max_model_len": 8192,
        }
        for name, types in ENGINES.items():
            with LLM(folder, **options, **types) as llm:
                if not text:
                    params = SamplingParams(max_tokens=asked.tokens - 1, ignore_eos=True, seed=0, detokenize=False)
                    text = [1, *llm.generate([[1]], params, use_tqdm=False)[0].outputs[0].token_ids]
                found[name] = scores(llm, text)
    true = found.pop("float32")
    for name, scored in found.items():
        print(f"{name}: {asked.layers} layers of {asked.hidden}, half-lives to {asked.longest} tokens")
        tell(list(zip(true, scored, strict=True)))


if __name__ == "__main__":
    main()

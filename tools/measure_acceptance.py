"""Tokens per second when a given mean number of tokens comes out of a step with drafts (synthetic acceptance).

    python tools/measure_acceptance.py [MODEL] [--engine quire|vllm] [--device cuda] [--method ngram] [--drafts 3]
                                       [--lengths 1.5,2,3] [--requests 1,8,64] [--prompt 512] [--tokens 256]
                                       [--changes JSON] [--head-vocab 32000]

MODEL is a name of `quire bench`, or a folder with a config.json, with dummy weights. Prompts repeat a period of 48
tokens, so that n-grams are found. The faster of three runs counts, prompts included. Length 0: without drafts. Each
number of drafts and each length that so many drafts can make has a new engine.

Methods with layers: mtp; eagle and eagle3, with a head of the model's sizes, dummy weights and --head-vocab ids. Their
first engine also answers requests without drafts ("loaded"): the layers make cache entries and draft nothing.
--changes: keys of config.json to replace, as in '{"num_hidden_layers": 8}'.
"""

import argparse
import gc
import importlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.bench.workload import HIGH_ID, LOW_ID, model_folder

HEADS = ("eagle", "eagle3")


def main() -> None:
    """Print a line for each number of drafts, length and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--engine", default="quire", choices=("quire", "vllm"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--drafts", default="3")
    parser.add_argument("--lengths", default="1.5,2,3")
    parser.add_argument("--requests", default="1,8,64")
    parser.add_argument("--changes", default={}, type=json.loads)
    for name, number in (("--prompt", 512), ("--tokens", 256), ("--head-vocab", 32000)):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    module = importlib.import_module(asked.engine)
    lengths = sorted(map(float, asked.lengths.split(",")))
    cases = [(0, 0.0)] if 0 in lengths else []
    cases += [
        (drafts, length)
        for drafts in map(int, asked.drafts.split(","))
        for length in lengths
        if 0 < length <= 1 + drafts
    ]
    loaded = asked.engine == "quire" and asked.method != "ngram"
    with tempfile.TemporaryDirectory() as folder:
        model, head = write_model(Path(folder), asked)
        for drafts, length in cases:
            start = time.perf_counter()
            llm = engine(module, asked, model, head, drafts=drafts, length=length)
            print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
            ways = [("loaded, no drafts", {"speculative_tokens": 0})] * (loaded and drafts > 0)
            for words, own in [*ways, (f"{drafts} drafts, {length:g} tokens a step", {})]:
                params = module.SamplingParams(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True, **own)
                measure(llm, params, words, asked)
            loaded = loaded and not drafts
            if asked.engine == "quire":
                llm.close()
            del llm
            gc.collect()


def measure(llm: Any, params: Any, words: str, asked: argparse.Namespace) -> None:
    """Print a line for each number of requests."""
    for count in map(int, asked.requests.split(",")):
        seconds, steps = min(run(llm, params, count, asked) for _ in range(3))
        each = f", {1000 * seconds / steps:.3f} ms a step, prompts included" if steps else ""
        print(
            f"{asked.engine} {asked.model} {asked.method}, {words}, {count} requests: "
            f"{count * asked.tokens / seconds:.1f} tokens/s{each}",
            flush=True,
        )


def write_model(folder: Path, asked: argparse.Namespace) -> tuple[str, str]:
    """Write the config.json of the model, and of its EAGLE head. Return both folders; "": there is no head."""
    given = Path(asked.model) if Path(asked.model).is_dir() else model_folder(asked.model)
    raw = json.loads((given / "config.json").read_text()) | asked.changes
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "max_position_embeddings",
        "rms_norm_eps",
        "vocab_size",
        "torch_dtype",
    )
    head = {name: raw[name] for name in sizes if name in raw}
    head |= {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "architectures": [f"LlamaForCausalLM{asked.method.capitalize()}"],
    }
    if asked.method == "eagle3":
        head["draft_vocab_size"] = min(asked.head_vocab, raw["vocab_size"])
    heads = {"head": head} if asked.method in HEADS else {}
    for name, config in ({"model": raw} | heads).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return str(folder / "model"), str(folder / "head") if heads else ""


def engine(module: Any, asked: argparse.Namespace, model: str, head: str, *, drafts: int, length: float) -> Any:
    """Return an engine of which so many tokens come out of a step."""
    given = {
        "method": asked.method,
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
    }
    given |= {"model": head} if head else {}
    given |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4} if asked.method == "ngram" else {}
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_num_seqs": 64,
        "max_model_len": asked.prompt + asked.tokens + 16,
        "speculative_config": given if drafts else None,
    }
    if asked.engine == "quire":
        options |= {"device": asked.device, "use_tqdm_on_load": False}
    return module.LLM(model=model, **options)


def run(llm: Any, params: Any, count: int, asked: argparse.Namespace) -> tuple[float, int]:
    """Return the seconds and steps of a run with so many requests, none of them known. Steps 0: they are unknown."""
    llm.reset_prefix_cache()
    draw, prompts = random.Random(count), []
    for _ in range(count):
        period = [draw.randrange(LOW_ID, HIGH_ID) for _ in range(48)]
        prompts.append({"prompt_token_ids": (period * -(-asked.prompt // len(period)))[: asked.prompt]})
    before, start = steps_of(llm, asked), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == asked.tokens for one in outputs)
    return time.perf_counter() - start, steps_of(llm, asked) - before


def steps_of(llm: Any, asked: argparse.Namespace) -> int:
    """Return the number of steps that an engine of Quire has run; 0 for another engine."""
    return llm.engine.core._step if asked.engine == "quire" else 0


if __name__ == "__main__":
    main()

"""Time of a decode step with adapters (LoRA), beside a step without; of Quire, or of vLLM in its own environment.

    python tools/measure_adapters.py [--engine quire] [--model qwen3-8b] [--ranks 16,64] [--adapters 1,16]
                                     [--batches 1,64,256] [--runs 3] [--tokens 192] [--device cuda]
    PYTHONPATH=src python tools/measure_adapters.py --engine vllm ...

Dummy weights, random adapters for all linear layers in bfloat16. Requests of a batch name the adapters in turn. The
time of a step is the difference of requests of --tokens and of 32 tokens, so prompts and starts are not counted; the
median of the runs counts. An engine without adapters is "plain"; there is another one for each rank, and "none" are
its batches whose requests name no adapter. A row has the share of the plain step, and the floor: the bytes of the
adapters of the step over the bandwidth (--bandwidth, GB/s), added to the plain step.
"""

import argparse
import gc
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench.workload import model_folder

FEW, PROMPT = 32, 64  # tokens of the shorter requests, and of the prompts
LINEARS = {  # name -> part of the layer, and its place among the sizes
    "q_proj": ("self_attn", 0),
    "k_proj": ("self_attn", 1),
    "v_proj": ("self_attn", 1),
    "o_proj": ("self_attn", 2),
    "gate_proj": ("mlp", 3),
    "up_proj": ("mlp", 3),
    "down_proj": ("mlp", 4),
}


def main() -> None:
    """Print a row for each engine, rank, number of adapters and batch."""
    asked = parse()
    folder = model_folder(asked.model) if not Path(asked.model).is_dir() else Path(asked.model)
    config = json.loads((folder / "config.json").read_text())
    batches = [int(one) for one in asked.batches.split(",")]
    with tempfile.TemporaryDirectory() as place:
        plain = measure(asked, folder, batches, None, [])
        for batch, seconds in plain[0].items():
            print(f"{asked.engine} plain, batch {batch}: {1000 * seconds:.3f} ms", flush=True)
        counts = [int(one) for one in asked.adapters.split(",")]
        for rank in (int(one) for one in asked.ranks.split(",")):
            made = [adapter(Path(place) / f"r{rank}-{n}", config, rank, n) for n in range(max(counts))]
            size = (made[0] / "adapter_model.safetensors").stat().st_size
            found = measure(asked, folder, batches, rank, made)
            for count in (0, *counts):
                for batch, seconds in found[count].items():
                    base = plain[0][batch]
                    floor = base + min(count, batch) * size / (1e9 * asked.bandwidth)
                    print(
                        f"{asked.engine} rank {rank}, {count or 'none'} of {len(made)} adapters, batch {batch}: "
                        f"{1000 * seconds:.3f} ms, {base / seconds:.3f} of plain (floor {base / floor:.3f})",
                        flush=True,
                    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--engine", "quire"), ("--model", "qwen3-8b"), ("--device", "cuda")):
        parser.add_argument(name, default=value)
    for name, value in (("--ranks", "16,64"), ("--adapters", "1,16"), ("--batches", "1,64,256")):
        parser.add_argument(name, default=value)
    for name, number in (("--runs", 3), ("--tokens", 192)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--bandwidth", type=float, default=4300.0)
    parser.add_argument("--engine-args", default="{}", help="JSON object passed to the engine")
    return parser.parse_args()


def adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> Path:
    """Write a random adapter for all linear layers of a dense decoder."""
    torch, save = importlib.import_module("torch"), importlib.import_module("safetensors.torch").save_file
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    sizes = [(heads, hidden), (kv, hidden), (hidden, heads), (inner, hidden), (hidden, inner)]
    random, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (part, number) in LINEARS.items():
            at, (outputs, inputs) = f"base_model.model.model.layers.{layer}.{part}.{name}", sizes[number]
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                made = torch.randn(shape, generator=random) * 0.01
                tensors[f"{at}.lora_{side}.weight"] = made.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(LINEARS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": "x"}))
    return folder


def measure(
    asked: argparse.Namespace, folder: Path, batches: list[int], rank: int | None, made: list[Path]
) -> dict[int, dict[int, float]]:
    """Return number of adapters -> batch -> median seconds of a step, of an engine with slots for all adapters."""
    module = importlib.import_module(asked.engine)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_num_seqs": max(64, *batches),
        "max_model_len": 1024,
    }
    if rank is not None:
        options |= {"enable_lora": True, "max_loras": len(made), "max_lora_rank": rank, "max_cpu_loras": len(made)}
    if asked.engine == "quire":
        options |= {"device": asked.device, "use_tqdm_on_load": False}
    llm = module.LLM(str(folder), **options | json.loads(asked.engine_args))
    requests = [asked_for(module, asked.engine)(path.name, n + 1, str(path)) for n, path in enumerate(made)]
    found: dict[int, dict[int, float]] = {}
    for count in (0, *([int(one) for one in asked.adapters.split(",")] if made else [])):
        found[count] = {}
        for batch in batches:
            used = [requests[n % count] if count else None for n in range(batch)]
            times = []
            for _ in range(1 + asked.runs):
                short, long = (run(module, llm, batch, tokens, used) for tokens in (FEW, asked.tokens))
                times.append((long - short) / (asked.tokens - FEW))
            found[count][batch] = statistics.median(times[1:])
    if asked.engine == "quire":
        llm.close()
    del llm
    gc.collect()
    importlib.import_module("torch").cuda.empty_cache()
    return found


def asked_for(module: Any, engine: str) -> Callable[..., Any]:
    """Return the class of an engine by which a request names its adapter."""
    named: Callable[..., Any] = (
        module.LoRARequest if engine == "quire" else importlib.import_module("vllm.lora.request").LoRARequest
    )
    return named


def run(module: Any, llm: Any, batch: int, tokens: int, used: list[Any]) -> float:
    """Return the seconds of a batch."""
    prompts = [{"prompt_token_ids": [1000 + (7 * n + at) % 5000 for at in range(PROMPT)]} for n in range(batch)]
    params = module.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    more = {"lora_request": used} if any(used) else {}
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    assert all(len(one.outputs[0].token_ids) == tokens for one in outputs), "a request ended early"
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

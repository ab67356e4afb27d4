"""Time vLLM's offline class on the shared workloads: dummy weights, greedy, token ids in and out.

    python -m quire.bench.peer.run_vllm qwen3-8b --out result.json [--only decode_b64,prefill_4k]

Set VLLM_NO_USAGE_STATS=1 and HF_HUB_OFFLINE=1. MODEL is a name under `bench/models` or a folder with a config.json.
"""

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

from quire.bench.workload import fastest_run, load_workloads, model_folder


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", default="-", help="result file; - prints it")
    parser.add_argument("--only", default="", help="workload names, separated by commas")
    parser.add_argument("--repeat", type=int, default=2, help="runs per workload; the fastest is reported")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    parser.add_argument("--max-len", type=int, default=None, help="maximum prompt and output length, in tokens")
    parser.add_argument("--engine-args", default="{}", help="JSON object passed to the engine")
    return parser.parse_args()


def main() -> None:
    """Construct vLLM's class, run the workloads, and write the JSON after each, so that a crash loses no result."""
    args = parse()
    folder = Path(args.model) if Path(args.model).is_dir() else model_folder(args.model)
    extra = json.loads(args.engine_args)
    start = time.perf_counter()
    torch, vllm = importlib.import_module("torch"), importlib.import_module("vllm")
    imported = time.perf_counter()
    engine = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 33_000, "seed": 0}
    llm = vllm.LLM(model=str(folder.resolve()), **(engine | {"gpu_memory_utilization": 0.9} | extra))
    ready = time.perf_counter()
    result: dict[str, Any] = {
        "engine": f"vllm {vllm.__version__}",
        "model": folder.name,
        "engine_args": extra,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "import_s": round(imported - start, 2),
        "construct_s": round(ready - imported, 2),
        "runs": [],
    }
    for work in load_workloads(args.only.split(",") if args.only else None, args.scale, args.max_len):
        row = fastest_run(llm, vllm.SamplingParams, work, args.repeat)
        result["runs"].append(row)
        print(f"{folder.name} {work.name}: {row['seconds']} s, {row['output_tokens_per_s']} out tok/s", flush=True)
        if args.out != "-":
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    if args.out == "-":
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

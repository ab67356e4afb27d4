"""Time transformers' `generate` on the shared workloads: random weights, greedy, ids in and out, one static batch.

    PYTHONPATH=src python tools/peer/run_transformers.py qwen3-0.6b --only latency_b1 --scale 0.125 --max-len 128

All prompts of a workload must have the same length, and all outputs, since there is no continuous batching.
"""

import argparse
import importlib
import json
import time

from quire.bench.workload import load_workloads, model_folder


def main() -> None:
    """Build the model in bfloat16. Print the JSON row of the fastest run of each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", default="", help="workload names, separated by commas")
    parser.add_argument("--repeat", type=int, default=2, help="runs per workload; the fastest is reported")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    parser.add_argument("--max-len", type=int, default=None, help="maximum prompt and output length, in tokens")
    args = parser.parse_args()
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(model_folder(args.model))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for work in load_workloads(args.only.split(",") if args.only else None, args.scale, args.max_len):
        ids = torch.tensor(work.prompts)
        rows = []
        for _ in range(args.repeat):
            start = time.perf_counter()
            count = work.outputs[0]
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - start
            rows.append(work.summary(seconds, (out.shape[1] - ids.shape[1]) * out.shape[0]))
        best = min(rows, key=lambda row: row["seconds"])
        engine = {"engine": f"transformers {transformers.__version__}", "model": args.model}
        print(json.dumps(engine | best), flush=True)


if __name__ == "__main__":
    main()

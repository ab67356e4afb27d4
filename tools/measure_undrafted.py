"""Time of a step without drafts in an engine that could draft, and in an engine without a drafter.

    python tools/measure_undrafted.py [--device cuda] [--cases mtp,eagle3,draft_model] [--requests 1] [--runs 5]
                                      [--prompt 128] [--tokens 576] [--changes JSON]

Cases: mtp is V2-Lite as a deepseek_v3 with one prediction layer, eagle3 Qwen3 8B with a head of its sizes, draft_model
Qwen3 8B with Qwen3 0.6B; dummy weights. --changes: keys of config.json to replace, as in '{"num_hidden_layers": 8}'.
The time of a step is the difference of requests of --tokens and of 64 tokens: prompts and starts are not counted. The
median of the runs counts, and the extremes are printed.
"""

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measure_acceptance import run, write_model
from quire import LLM, SamplingParams
from quire.bench.workload import model_folder

FEW = 64  # tokens of the shorter requests
V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("deepseek-v2-lite", V3),
    "eagle3": ("qwen3-8b", {}),
    "draft_model": ("qwen3-8b", {}),
}


def main() -> None:
    """Print two lines for each case and number of requests, and what the drafter costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--device", "cuda"), ("--cases", "mtp,eagle3"), ("--requests", "1")):
        parser.add_argument(name, default=value)
    for name, number in (("--prompt", 128), ("--tokens", 576), ("--runs", 5), ("--head-vocab", 32000)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--changes", default={}, type=json.loads)
    asked = parser.parse_args()
    more = asked.changes
    asked.engine = "quire"
    for case in asked.cases.split(","):
        asked.method, (asked.model, changes) = case, CASES[case]
        asked.changes = changes | more
        with tempfile.TemporaryDirectory() as folder:
            model, head = write_model(Path(folder), asked)
            head = str(model_folder("qwen3-0.6b")) if case == "draft_model" else head
            drafter = {"method": case, "num_speculative_tokens": 1} | ({"model": head} if head else {})
            plain = measure(asked, model, None)
            for count, seconds in measure(asked, model, drafter).items():
                cost = 100 * (seconds / plain[count] - 1)
                print(f"{case}, {count} requests: a step without drafts takes {cost:+.1f}%", flush=True)


def measure(asked: argparse.Namespace, model: str, drafter: dict[str, Any] | None) -> dict[int, float]:
    """Return the median seconds of a step for each number of requests, in an engine with this drafter."""
    found = {}
    counts = [int(count) for count in asked.requests.split(",")]
    with LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_num_seqs=max(64, *counts),
        max_model_len=asked.prompt + asked.tokens + 16,
        device=asked.device,
        use_tqdm_on_load=False,
        speculative_config=drafter,
    ) as llm:
        for count in counts:
            own = {"speculative_tokens": 0} if drafter else {}
            times = []
            for _ in range(1 + asked.runs):
                (few, short), (many, long) = (
                    run(llm, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **own), count, sized)
                    for tokens in (FEW, asked.tokens)
                    for sized in [argparse.Namespace(**vars(asked) | {"tokens": tokens})]
                )
                times.append((many - few) / (long - short))
            found[count] = statistics.median(times[1:])
            words = ", ".join(f"{1000 * seconds:.4f}" for seconds in (min(times[1:]), found[count], max(times[1:])))
            drafting = drafter["method"] if drafter else "no drafter"
            print(f"{asked.model}, {drafting}, {count} requests: {words} ms a step (least, median, most)", flush=True)
    gc.collect()
    return found


if __name__ == "__main__":
    main()

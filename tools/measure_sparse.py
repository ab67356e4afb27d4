"""Whole steps of models that choose tokens (sparse latent attention), beside their floors and beside dense twins.

    python tools/measure_sparse.py [--models deepseek-v3.2,glm-5] [--layers 4] [--contexts 4096,32768,131072]
                                   [--requests 1,16] [--cache fp8_ds_mla] [--runs 3] [--twins sparse,dense]

A model is a configuration of `quire bench`, cut to --layers layers of which one is dense, with dummy weights and
uniform routing. Its twin has the same sizes without an indexer, as a deepseek_v3. A prompt is timed with an empty
cache, up to its first token. Steps of decodes are the difference of answers of 80 and 16 tokens behind prompts that
are in the cache; the median of the runs counts. A floor is what `quire explain` tells of these layers. Where both twins
ran, the time that the choice of tokens saves in a layer is printed.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.workload import HIGH_ID, LOW_ID, model_folder
from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.reports.gpu_rates import RATES
from quire.reports.step_time import RankSteps, StepPart

FEW, MANY = 16, 80  # tokens of the answers whose difference counts
Times = dict[tuple[str, int, int], float]  # (kind, requests, context) -> seconds


def main() -> None:
    """Print a line for each prompt and each kind of step, and what the choice saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("--models", "deepseek-v3.2,glm-5"),
        ("--contexts", "4096,32768,131072"),
        ("--requests", "1,16"),
        ("--twins", "sparse,dense"),
        ("--cache", "fp8_ds_mla"),
        ("--device", "cuda"),
    ):
        parser.add_argument(name, default=value)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--changes", default={}, type=json.loads, help="keys of config.json to replace")
    asked = parser.parse_args()
    for model in asked.models.split(","):
        found = {twin: measure(asked, model, twin) for twin in asked.twins.split(",")}
        if len(found) > 1:
            for step, seconds in found["sparse"].items():
                saved = (found["dense"][step] - seconds) / asked.layers
                print(f"{model}, {told(step)}: sparse saves {1e6 * saved:.0f} us a layer", flush=True)


def measure(asked: argparse.Namespace, model: str, twin: str) -> Times:
    """Return the times of a model or of its dense twin."""
    contexts, counts = (sorted(map(int, text.split(","))) for text in (asked.contexts, asked.requests))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(cut(asked, model, twin)))
        options: dict[str, Any] = {
            "load_format": "dummy",
            "routing": "uniform",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "kv_cache_dtype": asked.cache,
            "max_num_seqs": max(counts),
            "max_model_len": max(contexts) + MANY,
        }
        floors = Floors(folder, options)
        with LLM(folder, device=asked.device, use_tqdm_on_load=False, **options) as llm:
            found: Times = {}
            for context in contexts:
                for step, seconds in times(llm, asked, context, counts):
                    found[step] = seconds
                    parts = floors.of(*step)
                    floor = sum(part.seconds or 0 for part in parts)
                    largest = max(parts, key=lambda part: part.seconds or 0)
                    print(
                        f"{model}, {twin}, {told(step)}: {1000 * seconds:.3f} ms, floor {1000 * floor:.3f} "
                        f"({seconds / floor:.2f}; most of it {largest.name})",
                        flush=True,
                    )
    gc.collect()
    return found


def cut(asked: argparse.Namespace, model: str, twin: str) -> dict[str, Any]:
    """Return the configuration to measure."""
    raw = json.loads((model_folder(model) / "config.json").read_text())
    raw |= {"num_hidden_layers": asked.layers, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    if twin == "dense":
        raw = {key: value for key, value in raw.items() if not key.startswith("index")}
        raw |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}
    return raw | asked.changes


def times(llm: LLM, asked: argparse.Namespace, context: int, counts: list[int]) -> Iterator[tuple[Any, float]]:
    """Yield (step, seconds): a prompt of `context` tokens, then a step of decodes behind so many of them."""
    llm.reset_prefix_cache()
    draw = random.Random(context)
    prompts = [[draw.randrange(LOW_ID, HIGH_ID) for _ in range(context)] for _ in range(max(counts))]
    took = [run(llm, [prompt], 1) for prompt in prompts]  # the first one may compile
    yield ("prompt", 1, context), statistics.median(took[1:] or took)
    for count in counts:
        some = prompts[:count]
        run(llm, some, FEW)
        steps = [(run(llm, some, MANY) - run(llm, some, FEW)) / (MANY - FEW) for _ in range(asked.runs)]
        yield ("decode", count, context), statistics.median(steps)


def run(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Return the seconds of an answer of so many tokens to each prompt."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def told(step: tuple[str, int, int]) -> str:
    """Return a step in words."""
    kind, requests, context = step
    return f"{kind} of {requests} at {context:,}"


class Floors:
    """Floors of steps of a model on one H200."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        config = EngineConfig.from_flat(model=folder, **options)
        report = plan_engine(config, "h200")
        rank, _ = report.holdings.held[-1]
        rates = next(one for one in RATES if one.name == "H200")
        self._chunk = report.holdings.plan.config.scheduler.token_budget()
        self._steps = RankSteps(holdings=report.holdings, rank=rank, rates=rates, exchanges=report.exchanges(rank))

    def of(self, kind: str, requests: int, context: int) -> list[StepPart]:
        """Return the parts of a step of decodes, or of all steps of a prompt."""
        if kind == "decode":
            return self._steps.decode(requests, context)
        ends = [min(start + self._chunk, context) for start in range(0, context, self._chunk)]
        starts = [0, *ends]
        return [
            part for start, end in zip(starts, ends, strict=False) for part in self._steps.prompts(1, end - start, end)
        ]


if __name__ == "__main__":
    main()

"""Decode steps of few rows with heads and attention as one kernel or two, in one engine, in turns.

    python tools/measure_launches.py [--models qwen3-0.6b,qwen3-8b,...] [--requests 1,4,16] [--runs 3] [--prompt 512]
                                     [--tokens 320] [--variants "chain;clusters;clusters 8:4:2"] [--traces "chain"]
                                     [--device cuda] [--changes JSON] [--json FILE]

Dummy weights. One engine per model: its CUDA graphs are captured once with each variant, whatever the plan has chosen
(`kernels/joined/choice.py`), and the variants take turns:

    chain       heads and attention are two kernels
    attention   `joined/decode_attention.py`, in all layers that can take it
    clusters    `joined/decode_clusters.py`; with numbers: blocks of a cluster, warps and stages in steps of every size

Of a model with latent attention, for which there is no variant "attention":

    chain       `prepare`, `absorbed` and the sum of its parts are kernels of their own
    clusters    `joined/latent_clusters.py`; with numbers: blocks of a cluster, warps, tokens of a stage, and stages

With " triton" behind it, products of one row are those of the kernels in Triton, not of `one_row/`; with " apart" norm,
router and choice of experts are three kernels.

The first variant is the one that the others are compared with. "again" at the end repeats it, for what has drifted.

The time of a step is the difference of requests of --tokens and of 64 tokens: prompts and starts are not counted. The
median of the runs counts, and the extremes are printed. --traces: variants of which the launches of a step and the time
in its kernels are traced, too. A variant that cannot be captured is named, and left out.

Checks: all runs of a variant give the same tokens. Tokens of the variants are compared; sums have other orders, so a
near tie may turn a token, after which a request's tokens differ. --changes: keys of config.json to replace.
"""

import argparse
import gc
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.profile import Event, where_time_goes
from quire.bench.workload import model_folder
from quire.kernels.compile_cache import compiling_ahead
from quire.kernels.joined import MOST_ROWS, decode_clusters, latent_clusters
from quire.kernels.joined.choice import MOST_LATENT_CLUSTERS, JoinedDecodes
from quire.kernels.one_row import product
from quire.kernels.routing import normed
from quire.layers.attention import Attention
from quire.layers.latent import LatentAttention
from quire.layers.stack import first_of_each_kind

MODELS = "qwen3-0.6b,qwen3-8b,qwen3-8b-fp8,qwen3-8b-awq,qwen3-30b-a3b,qwen3-30b-a3b-fp8,deepseek-v2-lite"
FEW = 64  # tokens of the shorter requests
WORDS = ("chain", "attention", "clusters", "again")
VARIANTS = "chain;attention;clusters;again"
Tokens = list[list[int]]


def main() -> int:
    """Print the measurements of each model. Return 1 if a variant gave other tokens the second time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--variants", default=VARIANTS, type=variants_of, help="separated by semicolons")
    for name, number in (("--prompt", 512), ("--tokens", 320), ("--runs", 3)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--changes", default={}, type=json.loads)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--traces", default=[], type=variants_of, help="variants whose kernels are printed, too")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in asked.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            raw = json.loads((model_folder(model) / "config.json").read_text()) | asked.changes
            Path(folder, "config.json").write_text(json.dumps(raw))
            rows += measure(asked, model, folder)
        gc.collect()
        if asked.json is not None:
            asked.json.write_text(json.dumps(rows, indent=1))
    print(json.dumps(rows), flush=True)
    return 0 if all(row["steady"] for row in rows) else 1


def variants_of(text: str) -> list[str]:
    """Return the variants that the command line names. Raises ArgumentTypeError for a word that is none."""
    found = [" ".join(one.split()) for one in text.split(";") if one.strip()]
    for one in found:
        words = r"(chain|attention|clusters( \d+(:\d+){2,3})?)( triton)?( apart)?"
        if one != "again" and not re.fullmatch(words, one):
            raise argparse.ArgumentTypeError(
                f"{one} is none of {', '.join(WORDS)}, clusters BLOCKS:WARPS:STAGES or BLOCKS:WARPS:TOKENS:STAGES"
            )
    return found


def measure(asked: argparse.Namespace, name: str, folder: str) -> list[dict[str, Any]]:
    """Measure a model. Return a row of numbers for each number of requests and variant."""
    counts, rows = [int(count) for count in asked.requests.split(",")], []
    start = time.perf_counter()
    with LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_num_seqs=max(counts),
        max_model_len=asked.prompt + asked.tokens + 16,
        device=asked.device,
        use_tqdm_on_load=False,
    ) as llm:
        print(f"{name}: engine after {time.perf_counter() - start:.1f} s", flush=True)
        choose, variants = captured(llm, asked.variants)
        print(f"{name}: {'; '.join(variants)}; after {time.perf_counter() - start:.1f} s", flush=True)
        for count in counts:
            times: dict[str, list[float]] = {variant: [] for variant in variants}
            texts: dict[str, list[Tokens]] = {variant: [] for variant in variants}
            for turn in range(1 + asked.runs):
                for variant in variants if turn % 2 else reversed(variants):
                    choose(variant)
                    (_, short), (tokens, long) = (run(llm, count, asked.prompt, own) for own in (FEW, asked.tokens))
                    times[variant].append((long - short) / (asked.tokens - FEW))
                    texts[variant].append(tokens)
            first = statistics.median(times[variants[0]][1:])
            for variant in variants:
                row = row_of(llm, name, count, variant, times[variant][1:], texts[variant])
                equals = equal(texts[variants[0]][0], texts[variant][0])
                rows.append(row | {"times": first * 1e3 / row["ms"], "equal": equals})
                print("  ".join(f"{key} {value}" for key, value in rounded(rows[-1]).items()), flush=True)
            for variant in (one for one in variants if one in asked.traces):
                choose(variant)
                trace(llm, f"{name}, {count} requests, {variant}", count, asked.prompt)
        print(f"{name}: done after {time.perf_counter() - start:.1f} s", flush=True)
    return rows


def row_of(llm: LLM, name: str, count: int, variant: str, times: list[float], texts: list[Tokens]) -> dict[str, Any]:
    """Return the numbers of a variant."""
    middle, layers = statistics.median(times), len(llm.engine.worker.model.layers)
    return {
        "model": name,
        "requests": count,
        "variant": variant,
        "ms": middle * 1e3,
        "least": min(times) * 1e3,
        "most": max(times) * 1e3,
        "us_a_layer": middle * 1e6 / layers,
        "tokens_per_s": count / middle,
        "steady": all(text == texts[0] for text in texts),
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers as they are printed."""
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def captured(llm: LLM, wanted: list[str]) -> tuple[Callable[[str], None], list[str]]:
    """Capture the CUDA graphs of decodes with each variant. Return a function that chooses a variant, and the variants.

    An engine that captures nothing, as on a CPU, runs each variant as it is chosen.
    """
    runner = llm.engine.worker
    every = [getattr(layer, "attention", None) for layer in runner.model.layers]
    own = [one for one in every if isinstance(one, Attention) and one.growth is None and not one.values]
    latent = [one for one in every if isinstance(one, LatentAttention) and one.sizes.index is None]
    features = runner.model.kernels.features("latent" if latent else "attention")
    can = {"chain", "again"} | ({"clusters"} if latent and "clusters" in features else set())
    can |= {"attention", "clusters"} if own and "heads" in features else set()
    graphs, programs = getattr(runner.recorder, "_graphs", {}), runner.programs
    shapes = [shape for shape in runner.recorder.shapes() if shape.decode and not shape.shared]
    made, variants = {}, []
    module: Any = latent_clusters if latent else decode_clusters
    constant, tiling = ("TILINGS" if latent else "TILING"), module.Tiling
    known = getattr(module, constant)

    def switch(variant: str) -> None:
        name = wanted[0] if variant == "again" else variant
        product.ENABLED, normed.ENABLED = " triton" not in name, " apart" not in name
        word, _, sizes = name.removesuffix(" apart").removesuffix(" triton").partition(" ")
        asked = tiling(*map(int, sizes.split(":"))) if sizes else known
        setattr(module, constant, {MOST_LATENT_CLUSTERS: asked} if latent and sizes else asked)
        for layer in own:
            rows = range(1, MOST_ROWS + 1) if word == "attention" else range(0)
            layer.joined = JoinedDecodes(MOST_ROWS * (word == "clusters"), "", rows, "")
        for one in latent:
            one.joined = JoinedDecodes(MOST_LATENT_CLUSTERS * (word == "clusters"), "", range(0), "", latent=True)

    def works() -> list[tuple[Any, Callable[[], None]]]:
        return [(key, work) for key, work in programs.recordings(shapes) if key[0].startswith("decode")]

    count = len(tiling._fields) - 1  # colons of a tiling
    wanted = [one for one in wanted if one.split()[0] in can and one.count(":") in (0, count)]
    if graphs:
        programs.some = first_of_each_kind(zip(runner.model.layers, programs.kv, strict=False))
        with torch.inference_mode(), compiling_ahead() as ahead:
            for variant in wanted:
                switch(variant)
                for _, work in works():
                    work()
        programs.some = range(len(runner.model.layers))
        print(ahead.report(), flush=True)
    for variant in wanted:
        switch(variant)
        try:
            with torch.inference_mode():
                for key, work in works() if graphs else ():
                    work()
                    runner.recorder.capture(key, work)
                    runner.recorder.run(key, work)
                if graphs:
                    torch.cuda.synchronize()
        except Exception as error:  # of the compiler, or of a launch: the others are still worth their time
            print(f"{variant} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        made[variant] = dict(graphs)
        variants.append(variant)

    def choose(variant: str) -> None:
        switch(variant)
        graphs.clear()
        graphs.update(made[variant])

    return choose, variants


def run(llm: LLM, count: int, prompt: int, tokens: int) -> tuple[Tokens, float]:
    """Return the tokens of so many requests, none of them known, and the seconds."""
    llm.reset_prefix_cache()
    draw = random.Random(count)
    prompts = [{"prompt_token_ids": [draw.randrange(1000, 30000) for _ in range(prompt)]} for _ in range(count)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [list(one.outputs[0].token_ids) for one in outputs], seconds


def equal(ours: Tokens, theirs: Tokens) -> int:
    """Return the number of tokens of all requests that are equal before the first that differs."""
    pairs = [list(zip(*pair, strict=True)) for pair in zip(ours, theirs, strict=True)]
    return min(next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs)


def trace(llm: LLM, words: str, count: int, prompt: int) -> None:
    """Print the launches of a step and the kernels in which it spends most of its time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA] if torch.cuda.is_available() else None) as traced:
        run(llm, count, prompt, FEW)
    found = where_time_goes(
        Event(event.name(), event.start_ns(), event.duration_ns())
        for event in traced.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
    kernels: list[dict[str, Any]] = found["kernels"][:14]
    listed = "; ".join(f"{one['kernel'][:28]} {one['calls']} x {one['us']}" for one in kernels)
    print(f"{words}: traced step {found['steps']}; kernels (calls x us): {listed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

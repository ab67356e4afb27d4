"""Cost of structured output for decodes on a device: tokens per second with grammars, with one, and without.

    PYTHONPATH=src python tools/grammar_cost.py [MODEL] [--tokenizer FOLDER] [--batch N] [--tokens N] [--device cuda]

MODEL is a name of `bench/models` (random weights); its tokenizer comes from `tools/mask_time.py --make FOLDER`. Without
a model it is the bundled one. Grammars are drawn in turn and cannot end within the tokens asked for, so every run does
the same number of steps; kinds of run take turns, and the fastest of each counts.
"""

import argparse
import random
import time
from typing import Any

import numpy as np

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.bench.offline import watching
from quire.bench.workload import model_folder

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PROMPT, RUNS = 512, 3


def thing(**properties: Any) -> dict[str, Any]:
    """A closed object, all of it required."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def long_array(item: Any) -> dict[str, Any]:
    """More items than fit into the tokens asked for."""
    return {"type": "array", "items": item, "minItems": 600}


GRAMMARS: list[dict[str, Any]] = [
    {"json": long_array(thing(name=TEXT, age=NUMBER, email={"type": "string", "format": "email"}))},
    {"json": long_array(thing(kind={"enum": [f"kind{i}" for i in range(40)]}, note=TEXT | {"maxLength": 80}))},
    {"json": long_array({"type": "object"})},
    {"json": long_array({"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}( [a-z]+)*$"})},
    {"regex": "([a-z]{1,12}[ ,.]){3000}"},
]


def params_of(kind: str, batch: int, tokens: int) -> list[SamplingParams]:
    """Greedy, of exactly so many tokens; which requests have a grammar: none, one or all."""
    held = {"none": 0, "one": 1, "all": batch}[kind]
    drawn = [StructuredOutputsParams(**GRAMMARS[i % len(GRAMMARS)]) if i < held else None for i in range(batch)]
    return [
        SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            min_tokens=0,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=grammar,
        )
        for grammar in drawn
    ]


def run(llm: LLM, kind: str, batch: int, tokens: int) -> tuple[float, float, float]:
    """Output tokens per second of one run; milliseconds between steps, median and p99."""
    draw = random.Random(0)
    ids = [[draw.randrange(1000, 3000) for _ in range(PROMPT)] for _ in range(batch)]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    with watching(llm.engine.core) as steps:
        done = llm.generate([{"prompt_token_ids": row} for row in ids], params_of(kind, batch, tokens), use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = {len(output.outputs[0].token_ids) for output in done}
    assert lengths == {tokens}, f"an output ended: {lengths}"
    gaps = np.diff([now for now, handles in steps if len(handles) == batch]) * 1000
    return batch * tokens / seconds, float(np.median(gaps)), float(np.percentile(gaps, 99))


def main() -> None:
    """A line for each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokenizer")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    given: dict[str, Any] = {"model": str(model_folder(args.model)), "load_format": "dummy"} if args.model else {}
    given |= {"tokenizer": args.tokenizer} if args.tokenizer else {}
    with LLM(use_tqdm_on_load=False, device=args.device, dtype="bfloat16", **given) as llm:
        run(llm, "all", args.batch, args.tokens)  # grammars are compiled once, and not here
        kinds = ("none", "one", "all")
        found = [{kind: run(llm, kind, args.batch, args.tokens) for kind in kinds} for _ in range(RUNS)]
    best = {kind: max(turn[kind] for turn in found) for kind in kinds}
    for kind, (speed, median, worst) in best.items():
        every = ", ".join(f"{turn[kind][0]:.0f}" for turn in found)
        print(
            f"{args.model or 'bundled'}, {args.batch} decodes, grammar for {kind}: {speed:.0f} tok/s ({every}), a "
            f"step {median:.2f} ms, p99 {worst:.2f}; {100 * (1 - speed / best['none'][0]):.1f}% less than without"
        )


if __name__ == "__main__":
    main()

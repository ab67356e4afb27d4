"""Number of experts that a step of decodes hits in each layer, with the routers of random weights.

    PYTHONPATH=src python tools/experts_hit.py qwen3-30b-a3b 64

Random routers treat every token alike, so few experts are hit and a decode step reads less than that of a trained
model: a speed with such weights says little without this number. The engine runs launch by launch, to be looked into.
"""

import sys
from functools import partial
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.bench.workload import model_folder

PROMPT, STEPS = 32, 16


def main() -> None:
    """Print a line: batch, experts hit per layer in the mean, and experts that uniform routing would hit."""
    name, batch = sys.argv[1], int(sys.argv[2])
    llm = LLM(
        str(model_folder(name)),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=batch,
        max_model_len=4 * PROMPT,
        use_tqdm_on_load=False,
    )
    moe = llm.engine.args.moe
    assert moe is not None, f"{name} has no experts"
    hit: dict[int, list[int]] = {}

    def note(layer: int, weights: object, ids: Any) -> None:
        if len(ids) == batch:  # a step of decodes
            hit.setdefault(layer, []).append(len(np.unique(ids.cpu().numpy())))

    for layer in llm.engine.args.expert_layers:
        llm.engine.worker.model.layers[layer].mlp.on_routing = partial(note, layer)
    draw = np.random.default_rng(0)
    ids = draw.integers(0, llm.engine.args.vocab_size, (batch, PROMPT)).tolist()
    prompts = [{"prompt_token_ids": row} for row in ids]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True), use_tqdm=False)
    means = [float(np.mean(counts)) for counts in hit.values()]
    routing = moe.routing
    even = routing.num_experts * (1 - (1 - routing.top_k / routing.num_experts) ** batch)
    print(
        f"{name}, {batch} decodes: {np.mean(means):.1f} of {routing.num_experts} experts hit per layer "
        f"({min(means):.1f} to {max(means):.1f}); {even:.1f} with uniform routing"
    )
    llm.close()


if __name__ == "__main__":
    main()

"""Tokens per second of one request with drafts by the model's own layer (MTP) and without, on the model's own text.

    python tools/measure_own_drafts.py MODEL [--drafts 0,1,2,3] [--device cpu] [--dtype bfloat16] [--tokens 256]
                                       [--rounds 5] [--threads 1]

Greedy answers to prompts of prose, code and JSON. Engines of all numbers of drafts are made first and take turns with
each prompt, so that another load of the machine meets all of them; the fastest of the rounds counts. On a
CPU that others use, too, seconds of the processor say more than those of the clock.
"""

import argparse
import os
import time
from contextlib import ExitStack

from quire import LLM, SamplingParams

PROMPTS = {
    "prose": "The json module provides functions",
    "code": "import os\n\n\ndef walk(path):\n    ",
    "json": '[{"name": "Tomas", "age": 31, "city": "Lima"}, {"name": "Mira", "age": 28, ',
}


def main() -> None:
    """Print a line for each text and number of drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafts", default="0,1,2,3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    params = SamplingParams(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        engines = {}
        for drafts in map(int, asked.drafts.split(",")):
            given = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
            engines[drafts] = stack.enter_context(
                LLM(
                    asked.model,
                    device=asked.device,
                    dtype=asked.dtype,
                    num_threads=asked.threads,
                    max_model_len=1024,
                    max_num_seqs=1,
                    use_tqdm_on_load=False,
                    enable_prefix_caching=False,
                    speculative_config=given,
                )
            )
        for text, prompt in PROMPTS.items():
            seconds: dict[int, list[tuple[float, float]]] = {drafts: [] for drafts in engines}
            steps = dict[int, int]()
            for _ in range(asked.rounds):
                for drafts, llm in engines.items():
                    first, start, used = llm.engine.core._step, time.perf_counter(), time.process_time()
                    llm.generate(prompt, params, use_tqdm=False)
                    seconds[drafts].append((time.perf_counter() - start, time.process_time() - used))
                    steps[drafts] = llm.engine.core._step - first
            took = {drafts: [min(each) for each in zip(*found, strict=True)] for drafts, found in seconds.items()}
            for drafts, (clock, used) in took.items():
                plain = took.get(0, [0.0, 0.0])
                print(
                    f"{text}, k = {drafts}: {asked.tokens / steps[drafts]:.2f} tokens a step, "
                    f"{asked.tokens / clock:.1f} tokens/s ({plain[0] / clock:.2f}x), {asked.tokens / used:.1f} per "
                    f"CPU second ({plain[1] / used:.2f}x), load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Conversations and agents on a tiny model with recurrent layers: tokens that places of checkpoints save, on a CPU.

    python tools/measure_checkpoints.py [--turns 10] [--talks 12] [--checkpoints 64] [--places PLACES ...]

conversations   --talks texts of 1,000 tokens and more, in turn. A turn adds an answer and a question, together a ninth
                of the text, so that nine tenths of the next prompt are known
agents          the same, and all have the first 600 tokens in common (instructions, tools); the answers are short
forks           each prompt repeats one of the earlier texts up to some place, and goes on otherwise

Prints, for each PLACES of `--state-checkpoint`: prompt tokens that were not computed, and checkpoints that were taken.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384, "full_attention_interval": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
PLACES = (
    "none", "prompt", "branch", "turn", "prompt,turn", "branch,turn", "prompt,branch", "prompt,branch,turn",
    "prompt,branch,turn,every=512", "every=512", "every=128",
)  # fmt: skip
Talk = tuple[int, list[int], int]  # number of the text, its new tokens, tokens of the answer


def conversations(talks: int, turns: int, draw: random.Random, common: int = 0) -> Iterator[Talk]:
    """Yield the turns of all texts, the first ones first."""
    shared = words(common, draw)
    for turn in range(turns):
        for talk in range(talks):
            added = round(1000 * (10 / 9) ** turn / 9)
            answer = added // 6 if common else added // 2
            yield talk, words(added - answer, draw) if turn else shared + words(1000 - common, draw), answer


def words(count: int, draw: random.Random) -> list[int]:
    """Return random tokens."""
    return [draw.randrange(4, 500) for _ in range(count)]


def answered(llm: Any, talks: Iterator[Talk]) -> tuple[int, int]:
    """Answer all turns. Return the prompt tokens, and how many of them were not computed."""
    from quire import SamplingParams

    texts, asked, found = dict[int, list[int]](), 0, 0
    for number, new, answer in talks:
        texts[number] = texts.get(number, []) + new
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([texts[number]], params, use_tqdm=False)
        asked, found = asked + len(texts[number]), found + (output.num_cached_tokens or 0)
        texts[number] = [*texts[number], *output.outputs[0].token_ids]
    return asked, found


def forks(talks: int, turns: int, draw: random.Random) -> Iterator[Talk]:
    """Yield prompts that share a part with an earlier one, each as a text of its own."""
    known = [words(2000, draw) for _ in range(talks)]
    for number in range(talks * turns):
        text = known[draw.randrange(talks)]
        new = text[: draw.choice((500, 1000, 1500))] + words(200, draw)
        yield number, text if number < talks else new, 20


def main() -> None:
    """Print a line per workload and places."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--talks", type=int, default=12)
    parser.add_argument("--checkpoints", type=int, default=64)
    parser.add_argument("--places", nargs="*", default=PLACES)
    asked = parser.parse_args()
    from quire import LLM

    sizes = (asked.talks, asked.turns)
    workloads = {"conversations": conversations, "agents": lambda *some: conversations(*some, 600), "forks": forks}
    options = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for name, workload in workloads.items():
            for places in asked.places:
                limits = {
                    "max_num_seqs": 4,
                    "kv_cache_memory_bytes": 1 << 28,
                    "max_model_len": 8192,
                    "state_memory_fraction": 0.5,
                }
                with LLM(folder, **options, **limits, state_checkpoint=places, use_tqdm_on_load=False) as llm:
                    states = llm.engine.core.scheduler.allocator.states
                    states.pool.take(states.pool.num_blocks - asked.checkpoints)  # the others are never free
                    prompt, found = answered(llm, workload(*sizes, random.Random(1)))
                    print(
                        f"{name:<14} {places:<30} {found:>8,} of {prompt:,} prompt tokens found "
                        f"({found / prompt:.1%}), {states.taken:,} checkpoints taken",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

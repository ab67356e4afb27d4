"""`--batch-invariant`: the logits of a text have the same bits in every engine and batch, cached or not.

Engines differ in the size of steps and blocks, in steps in flight, in drafts, and in room: requests are preempted and
computed again. Each answers all prompts at once, then again one by one from the prefix cache.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.native.library import missing

from ..support.full import only_full
from ..support.logits_tap import LogitsTap

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "runs")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
PLAIN: dict[str, Any] = {"max_num_batched_tokens": 512}
ENGINES: dict[str, dict[str, Any]] = {
    "preempted": {"max_num_batched_tokens": 23, "max_num_seqs": 7, "block_size": 8, "num_gpu_blocks_override": 26},
    "drafting": {"speculative_config": NGRAM, "max_num_batched_tokens": 64, "async_depth": 2},
    "eager": {"enforce_eager": True, "max_num_batched_tokens": 9, "max_num_seqs": 9},
    "no cache": {"enable_prefix_caching": False, "block_size": 64},
    "tiers": {"kv_offload_gb": 0.05, "kv_offload_policy": "write_through", "num_gpu_blocks_override": 12},
}
FAMILIES = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "glm4_moe", "llama4_text"]
RECURRENT = ["qwen3_5_text", "falcon_h1", "lfm2"]


def bits_of(
    llm: LLM, batches: Iterable[list[list[int]]], params: SamplingParams
) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield each text from whose end a token was sampled, with the bits of the logits; not those of wrong drafts."""
    rows: list[tuple[tuple[int, ...], bytes]] = []
    history, features = llm.engine.worker.state.tables.history, llm.engine.worker.features

    def note(slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        for slot, position, row in zip(slots.tolist(), positions.tolist(), logits.cpu(), strict=True):
            rows.append((tuple(history[slot, :position].tolist()), row.numpy().tobytes()))

    tap, texts = LogitsTap(note), set[tuple[int, ...]]()
    features.attach(tap)
    for batch in batches:
        for found in llm.generate([{"prompt_token_ids": one} for one in batch], params, use_tqdm=False):
            whole = (*found.prompt_token_ids, *found.outputs[0].token_ids)
            texts |= {whole[:length] for length in range(len(found.prompt_token_ids), len(whole))}
    features.detach(tap)
    yield from ((text, bits) for text, bits in rows if text in texts)


def twice(prompts: list[list[int]]) -> list[list[list[int]]]:
    """All prompts at once, then some of them one by one."""
    return [prompts, *([one] for one in prompts[::-2])]


@only_full
@pytest.mark.parametrize("family", FAMILIES + RECURRENT)
def test_engines_give_the_same_bits(
    family: str, engine: Callable[..., LLM], oracle: Any, tiny: Any, prompts: list[list[int]]
) -> None:
    folder = oracle(tiny(family=family)).folder
    options = {"batch_invariant": True, "kv_cache_memory_bytes": 1 << 24}
    known: dict[tuple[int, ...], bytes] = {}
    for name, more in {"plain": PLAIN, **ENGINES}.items():
        llm = engine(folder, **options | more)
        again = 0
        for text, bits in bits_of(llm, twice(prompts), PARAMS):
            assert known.setdefault(text, bits) == bits, (name, len(text))
            again += 1
        assert again > 7 * 24
        if name == "preempted" and family == "qwen3":
            assert llm.engine.core.scheduler.num_preempted > 0
    assert len(known) == 7 * 24

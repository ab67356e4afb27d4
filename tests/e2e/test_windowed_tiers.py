"""KV groups with windows on a disk, between engines, and between a prefill and a decode node; CacheBlend is refused.

"gemma3_text": windows of 9 tokens. "gemma4_text": also blocks of another size in each group. Tokens are transformers'.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kvnet import block_share

from ..support.addresses import free_address
from ..support.full import full_rows
from ..support.pairwise import Row
from .test_disaggregation import FIRST, role, until

COUNT = 24
SIZES: Row = {"block_size": 8, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 16, "kv_offload_gb": 0.01}


@pytest.fixture(scope="module", params=["gemma3_text", *full_rows(["gemma4_text", "llama4_text"])])
def checkpoint(request: pytest.FixtureRequest, oracle: Any, tiny: Any) -> Any:
    return oracle(tiny(family=request.param))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", "a key that both engines know")
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.1)


def ask(llm: LLM, prompts: list[list[int]], transfers: list[Any] | None = None) -> tuple[Any, list[int], set[Tier]]:
    """Return the tokens, the numbers of cached tokens, and the tiers from which blocks came, one prompt at a time."""
    outputs = []
    for prompt, transfer in zip(prompts, transfers or [None] * len(prompts), strict=True):
        asked = SamplingParams(
            max_tokens=COUNT, temperature=0.0, ignore_eos=True, detokenize=False, kv_transfer_params=transfer
        )
        outputs += llm.generate([prompt], asked, use_tqdm=False)
    flush(llm.engine.core)
    llm.engine.core.check()
    tiers = {origin.tier for one in outputs if one.metrics for origin in one.metrics.origins.values()}
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens or 0 for one in outputs], tiers


def reused(checkpoint: Any, llm: LLM, prompts: list[list[int]], tier: Tier, transfers: Any = None) -> None:
    """Assert that whole blocks of the prompts come from a tier, and that tokens are transformers'."""
    assert len(llm.engine.core.scheduler.allocator.groups) > 1
    tokens, cached, tiers = ask(llm, prompts, transfers)
    assert tokens == checkpoint.greedy(prompts, COUNT) and tiers == {tier}
    size = llm.engine.core.scheduler.allocator.hit_size
    assert cached == [(len(prompt) - 1) // size * size for prompt in prompts]


def test_blocks_on_a_disk(
    checkpoint: Any, engine: Callable[..., LLM], prompts: list[list[int]], tmp_path: Path
) -> None:
    """A second engine finds them."""
    options = SIZES | {"kv_offload_dir": str(tmp_path), "kv_offload_policy": "write_through"}
    with engine(checkpoint.folder, **options) as llm:
        assert ask(llm, prompts)[0] == checkpoint.greedy(prompts, COUNT)
    reused(checkpoint, engine(checkpoint.folder, **options), prompts, Tier.DISK)


def test_blocks_of_another_engine(
    key: None, checkpoint: Any, engine: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    options = SIZES | {"kv_offload_policy": "write_through"}
    sharer = engine(checkpoint.folder, kv_share=free_address(), **options)
    assert ask(sharer, prompts)[0] == checkpoint.greedy(prompts, COUNT)
    reader = engine(checkpoint.folder, kv_peers=(sharer.engine.config.share.kv_share,), **options)
    peer = reader.engine.core.scheduler.roster.store.sharing._promises._peers[0]
    until(lambda: peer.keys == set(sharer.engine.core.scheduler.roster.store.host._index))
    reused(checkpoint, reader, prompts, Tier.PEER)


def test_prefill_in_another_engine(
    key: None, checkpoint: Any, engine: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    prefiller = engine(checkpoint.folder, **SIZES, **role("kv_producer"), kv_share=free_address())
    address = prefiller.engine.config.share.kv_share
    decoder = engine(checkpoint.folder, **SIZES, **role("kv_consumer"), kv_peers=(address,))
    transfers = [prefiller.generate([prompt], FIRST, use_tqdm=False)[0].kv_transfer_params for prompt in prompts]
    assert all(transfers)
    reused(checkpoint, decoder, prompts, Tier.PEER, transfers)

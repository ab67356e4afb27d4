"""Recurrent layers: texts whose checkpoints leave the device and come back are those of plain decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kernels.page_copies import InlineCopies
from quire.kvnet import block_share

from ..dist.test_hosts import agent
from ..support.addresses import free_address
from ..support.full import full_rows, only_full
from ..support.tiny_models import Oracle, Tiny
from .test_disaggregation import until

# A cache that holds one conversation: each turn drives the blocks and checkpoints of the others out.
SMALL: dict[str, Any] = {
    "block_size": 8, "max_num_seqs": 2, "max_model_len": 160, "num_gpu_blocks_override": 40,
    "state_checkpoint": "prompt,branch,turn,every=16", "state_memory_fraction": 0.9,
}  # fmt: skip
TIERS: dict[str, Any] = {"kv_offload_gb": 0.02, "kv_offload_policy": "write_through"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
FAMILIES = ("qwen3_5_text", "granite_mamba", "lfm2")
TALKS, TURNS, NEW = 4, 3, 19


def talk(llm: LLM, few: int = 0) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of the turns of some conversations in turn, and how many tokens of each were cached.

    few   checkpoints that the device holds; 0: as many as memory allows
    """
    states, held = llm.engine.core.scheduler.allocator.states, list[int]()
    if few:
        held = states.pool.take(states.pool.num_blocks - few)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, detokenize=False)
    texts, tokens, cached = [[7 * i + 3 + j * j % 41 for j in range(30)] for i in range(TALKS)], [], []
    for turn in range(TURNS):
        for number in range(TALKS):
            (output,) = llm.generate([texts[number]], params, use_tqdm=False)
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens or 0)
            texts[number] = [*texts[number], *tokens[-1], 5 + number, 6 + turn]
    states.pool.release(held)
    flush(llm.engine.core)
    llm.engine.core.check()
    return tokens, cached


def tier(llm: LLM, name: Tier) -> Any:
    """Return the counters of a tier of checkpoints."""
    return llm.engine.core.state().stats.prefix.states.tiers[name]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, oracle: Callable[..., Oracle]) -> Any:
    return oracle(Tiny(family=request.param)).folder


def test_texts_through_tiers_are_plain_texts(folder: Any, engine: Callable[..., LLM], tmp_path: Path) -> None:
    plain, cached = talk(engine(folder, **SMALL, enable_prefix_caching=False))
    assert not any(cached)
    options = SMALL | TIERS | {"kv_offload_dir": str(tmp_path), "async_depth": 2}
    llm = engine(folder, **options)
    found, cached = talk(llm, few=3)
    assert found == plain and all(cached[TALKS:]), cached
    assert tier(llm, Tier.HOST).num_loaded >= TALKS and tier(llm, Tier.DISK).num_stored >= TALKS
    assert llm.engine.core.state().stats.prefix.states.cut <= 30 * TALKS
    again = engine(folder, **options)  # another engine finds the files
    found, cached = talk(again)
    assert found == plain and all(cached), cached
    assert tier(again, Tier.DISK).num_loaded >= TALKS and tier(again, Tier.DISK).num_failed == 0


@pytest.mark.parametrize(
    "ranks",
    full_rows([{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}]),
    ids=str,
)
def test_ranks_copy_their_parts_of_checkpoints(
    ranks: dict[str, int], oracle: Callable[..., Oracle], engine: Callable[..., LLM], tmp_path: Path
) -> None:
    """With three stages, one of them has no states."""
    folder = oracle(Tiny(family="qwen3_5_text")).folder
    plain, _ = talk(engine(folder, **SMALL, enable_prefix_caching=False))
    options = SMALL | TIERS | {"kv_offload_dir": str(tmp_path)} | ranks
    for few in (3, 0):
        llm = engine(folder, **options)
        found, cached = talk(llm, few)
        assert found == plain and all(cached[TALKS:]), cached
        assert tier(llm, Tier.HOST if few else Tier.DISK).num_loaded >= TALKS
        assert tier(llm, Tier.DISK).num_failed == 0


def test_texts_with_drafts_through_tiers_are_plain_texts(
    oracle: Callable[..., Oracle], engine: Callable[..., LLM]
) -> None:
    folder = oracle(Tiny(family="qwen3_5_text")).folder
    plain, _ = talk(engine(folder, **SMALL, enable_prefix_caching=False))
    llm = engine(folder, **SMALL | TIERS | {"kv_offload_policy": "lazy"}, speculative_config=NGRAM)
    found, cached = talk(llm, few=3)
    assert found == plain and all(cached[TALKS:]), cached
    assert tier(llm, Tier.HOST).num_loaded >= TALKS


def test_checkpoints_of_zeros_are_noticed(
    oracle: Callable[..., Oracle], engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above turn red when copies of checkpoints bring nothing."""
    copy, folder = InlineCopies.copy, oracle(Tiny(family="qwen3_5_text")).folder
    plain, _ = talk(engine(folder, **SMALL, enable_prefix_caching=False))
    llm = engine(folder, **SMALL | TIERS)
    checkpoints = llm.engine.core.scheduler.allocator.states.pool.num_blocks + 1

    def zeros(self: Any, sources: Any, targets: Any, *, to_host: bool) -> Any:
        ended = copy(self, sources, targets, to_host=to_host)
        if not to_host and len(self._device) == checkpoints:
            self._device[torch.as_tensor(targets)] = 0
        return ended

    monkeypatch.setattr(InlineCopies, "copy", zeros)
    assert talk(llm, few=3)[0] != plain


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that know each other, and tell often of their blocks."""
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", "a key that both engines know")
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.1)


def know(reader: LLM, sharer: LLM) -> None:
    """Wait until `reader` knows all blocks and checkpoints of `sharer`."""
    ours, theirs = (llm.engine.core.scheduler.roster.store for llm in (reader, sharer))
    for mine, other in ((ours.blocks, theirs.blocks), (ours.states, theirs.states)):
        until(lambda mine=mine, other=other: mine.below[-1]._peers[0].keys == set(other.host._index))


@pytest.mark.parametrize("near", [True, *full_rows([False])])
def test_engines_read_checkpoints_of_each_other(
    near: bool,
    cluster: None,
    folder: Any,
    engine: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through memory of this host, and over TCP."""
    if not near:
        monkeypatch.setattr(block_share.BlockLine, "near", False)
    sharer = engine(folder, **SMALL | TIERS, kv_share=free_address())
    plain, _ = talk(sharer)
    reader = engine(folder, **SMALL | TIERS, kv_peers=(sharer.engine.config.share.kv_share,))
    know(reader, sharer)
    found, cached = talk(reader)
    assert found == plain and all(cached), cached
    assert tier(reader, Tier.PEER).num_loaded >= TALKS and tier(reader, Tier.PEER).num_failed == 0


def test_a_checkpoint_goes_from_prefill_to_decode(
    cluster: None, oracle: Callable[..., Oracle], engine: Callable[..., LLM]
) -> None:
    """The decode node computes the tokens behind the last block boundary of the prompt, and no other."""
    folder = oracle(Tiny(family="qwen3_5_text")).folder

    def role(name: str) -> dict[str, Any]:
        return SMALL | TIERS | {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": name}}

    prefiller = engine(folder, **role("kv_producer"), kv_share=free_address())
    decoder = engine(folder, **role("kv_consumer"), kv_peers=(prefiller.engine.config.share.kv_share,))
    first = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, kv_transfer_params={"do_remote_decode": True}
    )
    given: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    for length in (1, 8, 9, 47, 64):
        prompt = [(7 * i + length) % 90 + 3 for i in range(length)]
        (output,) = prefiller.generate([prompt], first, use_tqdm=False)
        params = SamplingParams(**given, kv_transfer_params=output.kv_transfer_params)
        (found,) = decoder.generate([prompt], params, use_tqdm=False)
        (alone,) = prefiller.generate([prompt], SamplingParams(**given), use_tqdm=False)
        assert found.outputs[0].token_ids == alone.outputs[0].token_ids
        assert found.num_cached_tokens == (length - 1) // 8 * 8, length
    assert tier(decoder, Tier.PEER).num_loaded == 3 and tier(decoder, Tier.PEER).num_failed == 0
    sharing = prefiller.engine.core.scheduler.roster.store.sharing
    until(lambda: (sharing.expire(), not sharing._leases and not sharing.states._leases)[1])


@only_full
def test_checkpoints_of_ranks_on_two_hosts_are_found_and_read(
    cluster: None, oracle: Callable[..., Oracle], engine: Callable[..., LLM], tmp_path: Path
) -> None:
    """Each rank has its files, and is read, on its own host. The hosts are two programs on the loopback."""
    folder = oracle(Tiny(family="qwen3_5_text")).folder
    plain, _ = talk(engine(folder, **SMALL, enable_prefix_caching=False))
    options = SMALL | TIERS | {"tensor_parallel_size": 2}
    for restarted in (False, True):
        share, port = free_address(4), int(free_address().rpartition(":")[2])
        hosts = {"nnodes": 2, "master_port": port, "kv_share": share, "kv_offload_dir": str(tmp_path)}
        with agent(port, str(folder)) as other:
            llm = engine(folder, **options, **hosts)
            found, cached = talk(llm, few=0 if restarted else 3)
            assert found == plain and all(cached[0 if restarted else TALKS :]), cached
            assert tier(llm, Tier.DISK).num_loaded >= TALKS * restarted and tier(llm, Tier.DISK).num_failed == 0
            reader = engine(folder, **options, kv_peers=(share,))
            know(reader, llm)
            found, cached = talk(reader)
            assert found == plain and all(cached), cached
            assert tier(reader, Tier.PEER).num_loaded >= TALKS and tier(reader, Tier.PEER).num_failed == 0
            llm.close()
            assert other.end()[0] == 0

"""Engines of other numbers of ranks read each other's blocks: each rank its part, and a block counts if all have it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import QuireError
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kvnet import block_share

from ..support.addresses import free_address
from ..support.full import full_rows
from ..support.many_ranks import SIZES, SMALL, nothing_left, until
from ..support.planted_faults import plant_lines

OPTIONS = SMALL | {
    "num_gpu_blocks_override": 40,
    "max_model_len": 192,
    "max_num_seqs": 3,
    "block_size": 16,
    "kv_offload_gb": 0.02,
}
FIRST = SamplingParams(max_tokens=1, temperature=0.0, kv_transfer_params={"do_remote_decode": True})


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_KEY", "a key that both engines know")
        patch.setattr(block_share, "BEAT_SECONDS", 0.1)
        yield


def node(sizes: str, share: str, peer: str, **options: Any) -> LLM:
    """Return an engine that computes prompts for its peer, and goes on with those of its peer."""
    role = {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": "kv_both"}}
    return LLM(**OPTIONS, **SIZES.get(sizes, {}), **role, **options, kv_share=share, kv_peers=(peer,))


def tokens(llm: LLM, seed: int, transfer: Any = None) -> tuple[list[int], int, set[Tier]]:
    """Return the tokens, the number of cached tokens, and the tiers from which these came."""
    prompt = {"prompt_token_ids": [(7 * i + seed) % 500 + 300 for i in range(49)]}
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, kv_transfer_params=transfer)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    flush(llm.engine.core)
    llm.engine.core.check()
    assert output.metrics is not None
    return (
        output.outputs[0].token_ids,
        output.num_cached_tokens or 0,
        {origin.tier for origin in output.metrics.origins.values()},
    )


def prefill(llm: LLM, seed: int) -> dict[str, Any]:
    """Return what a prefill node answers for the decode node."""
    (output,) = llm.generate(
        {"prompt_token_ids": [(7 * i + seed) % 500 + 300 for i in range(49)]}, FIRST, use_tqdm=False
    )
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def stats(llm: LLM) -> Any:
    return llm.engine.core.state().stats.tiers[Tier.PEER]


def leases(llm: LLM) -> int:
    sharing = llm.engine.core.scheduler.roster.store.sharing
    sharing.expire()
    return len(sharing._leases)


@pytest.mark.parametrize(
    ("sizes", "way", "options"),
    [
        ("tp2", "memory", {}),
        *full_rows(
            [
                ("tp2", "tcp", {}),
                ("pp2", "memory", {}),
                ("tp2-pp2", "memory", {}),
                ("tp2-pp2", "tcp", {}),
                ("tp2", "memory", {"kv_cache_dtype": "fp8"}),
            ]
        ),
    ],
    ids=str,
)
def test_prefill_and_decode_on_other_numbers_of_ranks(
    sizes: str, way: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "tcp":  # a share that names another file is read over TCP
        shared = block_share.Shared
        monkeypatch.setattr(
            block_share,
            "Shared",
            lambda shards: shared(tuple(msgspec.structs.replace(shard, token=b"of another file") for shard in shards)),
        )
    with nothing_left(tmp_path / "temporary") as left:
        one, many = free_address(), free_address()
        with node("", one, many, **options) as single, node(sizes, many, one, **options) as several:
            for seed, (first, second) in enumerate([(single, several), (several, single)]):
                transfer = prefill(first, seed)
                assert transfer["tp_size"] == (2 if first is several and "tp2" in sizes else 1)
                found, *rest = tokens(second, seed, transfer)
                assert rest == [48, {Tier.PEER}] and stats(second).num_loaded == 3 and stats(second).num_failed == 0
                first.reset_prefix_cache()
                assert tokens(first, seed) == (found, 0, set())
            plant_lines(monkeypatch, "page=lost" + "/ok" * 99)
            transfer = prefill(single, 3)
            found, cached, _ = tokens(several, 3, transfer)
            assert cached == 0 and stats(several).num_failed == 1, "a rank lacks the first block"
            single.reset_prefix_cache()
            assert tokens(single, 3) == (found, 0, set())
            until(lambda: not leases(single) + leases(several), lambda: "a lease is left")
            truth = tokens(single, 5)[0]
            single.reset_prefix_cache()
            transfer = prefill(several, 5)
            os.kill(left.ranks()[-1], signal.SIGKILL)
            assert tokens(single, 5, transfer)[0] == truth, "a rank of the prefill node is gone"
            with pytest.raises(QuireError, match="rank .* was killed by SIGKILL"):
                tokens(several, 6, prefill(single, 6))

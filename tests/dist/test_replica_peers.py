"""Replicas of a server read each other's blocks, and those of other engines: each is an engine of its own for sharing.

Replica i is read at the port of --kv-share plus i. Requests of equal load take turns, the first one gets replica 0.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import ConfigError, EngineDead
from quire.contracts.step import Tier
from quire.engine.core import EngineCore
from quire.engine.replicas import Replicas, flush
from quire.kvnet import block_share

from ..e2e.in_process import Inside, running_inside
from ..support.addresses import free_address
from ..support.full import full_rows
from ..support.many_ranks import LARGER, SIZES, Left, until
from .test_hosts import agent

OPTIONS = {
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks_override": 40,
    "max_model_len": 192,
    "max_num_seqs": 3,
    "block_size": 16,
    "kv_offload_gb": 0.04,
    "kv_offload_policy": "write_through",
}
NODE = OPTIONS | {"skip_tokenizer_init": True, "use_tqdm_on_load": False}
FIRST = SamplingParams(max_tokens=1, temperature=0.0, kv_transfer_params={"do_remote_decode": True})


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_KEY", "a key that all engines know")
        patch.setattr(block_share, "BEAT_SECONDS", 0.1)
        yield


def next_to(address: str) -> str:
    """Return the address of replica 1."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def tokens_of(seed: int) -> list[int]:
    return [(7 * i + seed) % 47 + 3 for i in range(49)]


def stores(core: Any) -> list[Any]:
    return [one.scheduler.roster.store for one in (core.cores if isinstance(core, Replicas) else [core])]


def know(core: Replicas, least: int) -> None:
    """Wait until both replicas know which blocks the other one has, of at least so many together."""

    def known() -> bool:
        held = [set(store.host._index) for store in stores(core)]
        told = [store.sharing._promises._peers[0].keys for store in stores(core)]
        return sum(map(len, held)) >= least and told == held[::-1]

    until(known, lambda: "a replica does not hear of the other's blocks")


def is_dead(core: EngineCore) -> bool:
    try:
        core.executor.check_alive()
    except EngineDead:
        return True
    return False


def ask(inside: Inside, seed: int) -> tuple[str, int, set[tuple[str, str]]]:
    """Return the text, the number of cached tokens, and tier and peer of blocks that came from other tiers."""
    asked = {"prompt": tokens_of(seed), "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    answer = inside.server.ask("/v1/completions", asked)
    assert answer.status == 200, answer.body
    found = answer.json()
    records = inside.server.ask("/debug/requests").json()
    records = records["requests"] if isinstance(records, dict) else records
    (record,) = [one for one in records if found["id"].endswith(one["request_id"]) or one["request_id"] == found["id"]]
    details = found["usage"]["prompt_tokens_details"] or {}
    return (
        found["choices"][0]["text"],
        details.get("cached_tokens", 0),
        {(block["tier"], block.get("peer", "")) for block in record["fetched"].values()},
    )


def test_a_prompt_of_a_replica_is_read_by_the_other(left: Left, caplog: pytest.LogCaptureFixture) -> None:
    share = free_address(2)
    with running_inside(device="cpu", **OPTIONS, **SIZES["dp2"], kv_share=share) as inside:
        core = inside.core
        assert isinstance(core, Replicas) and "shares no KV blocks" not in caplog.text
        for seed, holder in ((0, share), (1, next_to(share))):
            text, cached, came = ask(inside, seed)
            assert (cached, came) == (0, set())
            know(core, 3 + 6 * seed)
            assert ask(inside, seed) == (text, 48, {("peer", holder)})
            assert ask(inside, seed) == (text, 48, set()), "the first one has them on its device"
        text = ask(inside, 2)[0]
        know(core, 15)
        os.kill(left.ranks()[0], signal.SIGKILL)
        until(lambda: len(left.ranks()) == 1, lambda: "the rank runs on")
        assert ask(inside, 2)[0] == text, "whatever of its blocks could still be read"
        until(lambda: is_dead(core.cores[0]), lambda: "nobody notices")
        assert ask(inside, 2)[0] == ask(inside, 2)[0] == text and core.live == [core.cores[1]]


def generate(llm: LLM, seed: int, transfer: Any = None) -> tuple[list[int], int, set[tuple[Tier, str]]]:
    """Return the tokens, the number of cached tokens, and tier and peer of blocks that came from other tiers."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, kv_transfer_params=transfer)
    (output,) = llm.generate({"prompt_token_ids": tokens_of(seed)}, params, use_tqdm=False)
    flush(llm.engine.core)
    llm.engine.core.check()
    assert output.metrics is not None
    return (
        output.outputs[0].token_ids,
        output.num_cached_tokens or 0,
        {(origin.tier, origin.peer) for origin in output.metrics.origins.values()},
    )


def prefill(llm: LLM, seed: int) -> dict[str, Any]:
    """Return what a prefill node answers for the decode node."""
    (output,) = llm.generate({"prompt_token_ids": tokens_of(seed)}, FIRST, use_tqdm=False)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def leases(llm: LLM) -> int:
    for store in stores(llm.engine.core):
        store.sharing.expire()
    return sum(len(store.sharing._leases) for store in stores(llm.engine.core))


def role(name: str) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": name}}


@pytest.mark.parametrize(
    ("sizes", "drafts"), [("dp2-ep", False), *full_rows([("dp2", False), ("dp2-ep", True), ("dp2-pp2-ep", True)])]
)
def test_prefill_and_decode_nodes_of_replicas(
    sizes: str, drafts: bool, checkpoint: Callable[[str], Path], left: Left, shared: Path
) -> None:
    """Every prompt is computed once, by either replica of the prefill node, and goes on in either of the other."""
    share, model = free_address(2), {"model": str(checkpoint("qwen3_moe"))} | NODE | (LARGER | SIZES)[sizes]
    if drafts:
        given = {"method": "mtp", "num_speculative_tokens": 2}
        model |= {"model": str(shared / "models" / "quire-tiny-moe"), "speculative_config": given}
    with (
        LLM(**model, **role("kv_producer"), kv_share=share) as first,
        LLM(**model, **role("kv_consumer"), kv_peers=(share, next_to(share))) as second,
    ):
        for seed in range(4):
            place = share if seed % 2 == 0 else next_to(share)
            transfer = prefill(first, seed)
            assert f"{transfer['remote_host']}:{transfer['remote_port']}" == place == transfer["remote_engine_id"]
            found = generate(second, seed, transfer)
            assert found[1:] == (48, {(Tier.PEER, place)})
            assert found[0] == generate(first, seed)[0]
            generate(first, 90 + seed)  # so that the replica's turn is the other's
        until(lambda: not leases(first), lambda: "a lease is left")


def test_a_replica_that_cannot_share_ends_those_before_it(left: Left) -> None:
    address = free_address(2)
    host, _, port = next_to(address).partition(":")
    with socket.create_server((host, int(port))), pytest.raises(ConfigError, match=f"{host}:{port}"):
        LLM(**NODE, data_parallel_size=2, kv_share=address)
    with socket.create_server((host, int(port) - 1)):
        pass


@pytest.mark.parametrize("sizes", ["tp2", *full_rows(["pp2", "dp2"])])
def test_an_engine_on_two_hosts_and_another_one_read_each_other(sizes: str, left: Left, tmp_path: Path) -> None:
    """The hosts are two programs on the loopback. Each rank reads, is read and has files on its own host."""
    share, theirs, port = free_address(), free_address(6), int(free_address().rpartition(":")[2])
    peers = [theirs, next_to(theirs)][: SIZES[sizes].get("data_parallel_size", 1)]
    hosts = SIZES[sizes] | {"nnodes": 2, "master_port": port, "kv_offload_dir": str(tmp_path / "kv")}
    common = OPTIONS | {"use_tqdm_on_load": False}
    with LLM(**common, kv_share=share, kv_peers=peers) as alone, agent(port) as other:
        first = generate(alone, 0)[0]
        with LLM(**common, **hosts, kv_share=theirs, kv_peers=(share,)) as two:
            own, many = stores(alone.engine.core)[0], stores(two.engine.core)
            reader, heard = own.sharing._promises._peers, [store.sharing._promises._peers[-1] for store in many]
            until(lambda: all(one.keys == own.host._index.keys() for one in heard), lambda: "no block is heard of")
            assert generate(two, 0) == (first, 48, {(Tier.PEER, share)})
            for seed in range(1, len(peers) + 1):  # replicas take turns
                truth, cached, _ = generate(two, seed)
                assert cached == 0
                until(
                    lambda: [one.keys for one in reader] == [store.host._index.keys() for store in many],
                    lambda: "no block is heard of",
                )
                found, cached, came = generate(alone, seed)
                assert (found, cached) == (truth, 48) and {tier for tier, _ in came} == {Tier.PEER}
            for store in (own, *many):
                assert store.stats[Tier.PEER].num_failed == 0
            assert sum(store.stats[Tier.DISK].num_stored for store in many) >= 3 * len(peers)
            told = [store for store in many if store.hosted]
            assert len(told) == 1, "the ranks of the other host are in one replica"
            assert sum(map(told[0].hosted[False].has, told[0].host._index)) >= 3
        assert other.end()[0] == 0
        assert generate(alone, 2)[0] == generate(alone, 2)[0], "peers that are gone cost nothing"
    assert len(list((tmp_path / "kv").glob("*/*/*/*.kv"))) >= 6

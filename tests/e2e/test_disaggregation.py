"""Prefill in one engine and decode in another: tokens are those of one engine, also when the prefill node is lost."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import InvalidParameter
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.entry.prompts import Prompt
from quire.kvnet import block_peers, block_share

from ..support.addresses import free_address
from ..support.planted_faults import PAGE_FAULTS, PHASES, plant_lines
from .in_process import running_inside

SMALL = {
    "dtype": "float32",
    "num_gpu_blocks_override": 40,
    "max_model_len": 192,
    "max_num_seqs": 3,
    "block_size": 16,
    "kv_offload_gb": 0.02,
}
KEY = "a key that both engines know"
LENGTHS = (1, 16, 17, 49)
FIRST = SamplingParams(max_tokens=1, temperature=0.0, kv_transfer_params={"do_remote_decode": True})


def role(name: str) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": name}}


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i + length + seed) % 500 + 300 for i in range(length)]}


def params(length: int, transfer: Any = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=9, temperature=0.7 * (length % 2), seed=length, ignore_eos=True, kv_transfer_params=transfer
    )


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_KEY", KEY)
        patch.setattr(block_share, "BEAT_SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def prefiller() -> Iterator[LLM]:
    with LLM(**SMALL, **role("kv_producer"), kv_share=free_address()) as llm:
        yield llm


@pytest.fixture(scope="module")
def decoder(prefiller: LLM) -> Iterator[LLM]:
    with LLM(**SMALL, **role("kv_consumer"), kv_peers=(prefiller.engine.config.share.kv_share,)) as llm:
        yield llm


def prefill(llm: LLM, asked: dict[str, list[int]]) -> dict[str, Any]:
    """Return what a prefill node answers for the decode node."""
    (output,) = llm.generate(asked, FIRST, use_tqdm=False)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(llm: LLM, length: int, transfer: Any, seed: int = 0) -> tuple[list[int], int, set[Tier]]:
    """Return the tokens, the number of cached tokens, and the tiers from which these came."""
    (output,) = llm.generate(prompt(length, seed), params(length, transfer), use_tqdm=False)
    flush(llm.engine.core)
    llm.engine.core.check()
    assert output.kv_transfer_params is None and output.metrics is not None
    return (
        output.outputs[0].token_ids,
        output.num_cached_tokens or 0,
        {origin.tier for origin in output.metrics.origins.values()},
    )


def leases(llm: LLM) -> int:
    """Return the number of leases that a prefill node still holds, after it has heard all that it was told."""
    sharing = llm.engine.core.scheduler.roster.store.sharing
    sharing.expire()
    return len(sharing._leases)


def test_tokens_are_those_of_one_engine(prefiller: LLM, decoder: LLM) -> None:
    for length in LENGTHS:
        asked = prompt(length)
        transfer = prefill(prefiller, asked)
        assert transfer["do_remote_prefill"] is True and transfer["do_remote_decode"] is False
        assert transfer["remote_block_ids"] == [*range(length // 16)] and transfer["remote_num_tokens"] == length
        tokens, cached, tiers = decode(decoder, length, transfer)
        assert cached == (length - 1) // 16 * 16 and tiers == ({Tier.PEER} if cached else set())
        (alone,) = prefiller.generate(asked, params(length), use_tqdm=False)
        assert tokens == alone.outputs[0].token_ids
        assert decode(decoder, length, prefill(prefiller, asked))[:2] == (tokens, cached), "all is there"
        longer = {"prompt_token_ids": [*asked["prompt_token_ids"], *range(300, 340)]}
        whole = decoder.generate(longer, params(1, prefill(prefiller, longer)), use_tqdm=False)[0]
        assert whole.num_cached_tokens == (length + 39) // 16 * 16, "a part is there, and a part comes"
        (alone,) = prefiller.generate(longer, params(1), use_tqdm=False)
        assert whole.outputs[0].token_ids == alone.outputs[0].token_ids
    until(lambda: not leases(prefiller))


def test_an_abort_before_the_blocks_came_ends_the_lease(
    prefiller: LLM, decoder: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = prefill(prefiller, prompt(48, 5))
    core, front, told = decoder.engine.core, decoder._front, set[tuple[str, bool]]()
    generation, (request,) = front.start(
        Prompt(text=None, token_ids=prompt(48, 5)["prompt_token_ids"]), params(48, transfer)
    )
    core.add(request)
    sharing = prefiller.engine.core.scheduler.roster.store.sharing
    while (transfer["remote_request_id"], True) not in told:  # a request that waits renews its lease
        told.add(sharing.told.get(timeout=20))
    assert leases(prefiller) == 1
    for handle in front.drop(generation):
        core.abort(handle)
    flush(core)
    until(lambda: not leases(prefiller))


@pytest.mark.parametrize("fault", [*PAGE_FAULTS, *PHASES])
def test_faults_cost_no_token(prefiller: LLM, decoder: LLM, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(block_peers, "AVOID_SECONDS", 0.0)  # a silent peer would share nothing with the next test
    phase = fault in PHASES
    plant_lines(monkeypatch, (fault if phase else f"page=ok/{fault}") + "/ok" * 20)
    seed = 20 + [*PAGE_FAULTS, *PHASES].index(fault)
    transfer = prefill(prefiller, prompt(49, seed))
    tokens, cached, _ = decode(decoder, 49, transfer, seed)
    assert cached == 48 or phase or (cached == 16 and fault != "slow")  # heard again before the request gives up
    (alone,) = prefiller.generate(prompt(49, seed), params(49), use_tqdm=False)
    assert tokens == alone.outputs[0].token_ids


def test_a_lost_prefill_node(decoder: LLM, prefiller: LLM) -> None:
    (alone,) = prefiller.generate(prompt(49, 90), params(49), use_tqdm=False)
    nobody = prefill(prefiller, prompt(49, 91)) | {"remote_port": 9}
    assert decode(decoder, 49, nobody, 90)[0] == alone.outputs[0].token_ids, "no peer of the decode node"
    with LLM(**SMALL, **role("kv_both"), kv_share=(mine := free_address()), kv_peers=(mine,)) as lost:
        transfer = prefill(lost, prompt(49, 92))
    with LLM(**SMALL, **role("kv_consumer"), kv_peers=(mine,)) as other:
        tokens, cached, _ = decode(other, 49, transfer, 92)
        assert cached == 0
        assert tokens == prefiller.generate(prompt(49, 92), params(49), use_tqdm=False)[0].outputs[0].token_ids


def test_each_node_has_its_part(prefiller: LLM, decoder: LLM) -> None:
    transfer = prefill(prefiller, prompt(5))
    for llm, wrong, words in (
        (prefiller, transfer, 'do_remote_prefill needs an engine .* "kv_role": "kv_consumer"'),
        (decoder, {"do_remote_decode": True}, 'do_remote_decode needs an engine .* "kv_role": "kv_producer"'),
        (decoder, transfer | {"do_remote_decode": True}, "either prefills or decodes"),
        (decoder, {"do_remote_prefill": True}, "without remote_host, remote_port and remote_request_id"),
        (decoder, transfer | {"remote_port": "many"}, "Expected `int"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            llm.generate(prompt(5), params(5, wrong), use_tqdm=False)
    for nothing in ({}, {"do_remote_decode": False, "do_remote_prefill": None, "remote_host": None}):
        assert decode(decoder, 5, nothing)[0]


def test_a_proxy_of_vllm_finds_its_fields() -> None:
    """The way of toy_proxy_server.py: the body goes to the prefill node first, and its answer to the decode node."""
    small = {name: value for name, value in SMALL.items() if name != "num_gpu_blocks_override"} | {"device": "cpu"}
    share = free_address()
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    text = "The garden of Tomas lies between two hills, and rain falls on it all night long. " * 2
    with (
        running_inside(**small, **role("kv_producer"), kv_share=share) as first,
        running_inside(**small, **role("kv_consumer"), kv_peers=(share,)) as second,
    ):
        for path, asked in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            question = body | asked
            to_first = question | {
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "remote_engine_id": None,
                    "remote_block_ids": None,
                    "remote_host": None,
                    "remote_port": None,
                },
            }
            answer = first.server.ask(path, to_first).json()
            transfer = answer["kv_transfer_params"]
            assert transfer["do_remote_prefill"] and f"{transfer['remote_host']}:{transfer['remote_port']}" == share
            decoded = second.server.ask(path, question | {"kv_transfer_params": transfer}).json()
            assert "kv_transfer_params" not in decoded
            alone = first.server.ask(path, question).json()
            assert decoded["choices"] == alone["choices"]
            assert decoded["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
            refused = first.server.ask(path, to_first | {"stream": True})
            assert refused.status == 400 and b"leave out stream" in refused.body
        ended = second.server.ask("/debug/requests").json()
        ended = ended["requests"] if isinstance(ended, dict) else ended
        assert {block["tier"] for one in ended for block in one["fetched"].values()} == {"peer"}
        loaded = second.server.metric("quire:kv_tier_copied_blocks_total")
        assert sum(value for labels, value in loaded.items() if "peer" in str(labels) and "load" in str(labels)) > 4
        refused = second.server.ask("/v1/responses", {"input": "a", "kv_transfer_params": transfer})
        assert refused.status == 400 and b"use /v1/chat/completions" in refused.body


def test_a_prompt_of_texts_at_other_positions_is_decoded_elsewhere() -> None:
    """The decode node gets KV that was moved, under a name that no other request finds it by."""
    notes = [prompt(40, seed)["prompt_token_ids"] for seed in (1, 2)]
    asked = {"prompt_token_ids": [*prompt(20)["prompt_token_ids"], *notes[1], *notes[0], 301, 302, 303]}
    chunks = {"kv_chunks": [[20, 60], [60, 100]], "blend_ratio": 0.2}
    with LLM(**SMALL, **role("kv_producer"), kv_share=free_address(), enable_cache_blend=True) as first:
        for note in notes:
            first.generate({"prompt_token_ids": note}, SamplingParams(max_tokens=1), use_tqdm=False)
        (alone,) = first.generate(asked, params(40).clone(**chunks), use_tqdm=False)
        (whole,) = first.generate(asked, params(40).clone(kv_chunks=[]), use_tqdm=False)
        assert alone.outputs[0].token_ids != whole.outputs[0].token_ids, "the case tells nothing"
        first.reset_prefix_cache()
        for note in notes:
            first.generate({"prompt_token_ids": note}, SamplingParams(max_tokens=1), use_tqdm=False)
        (output,) = first.generate(asked, FIRST.clone(**chunks), use_tqdm=False)
        assert output.num_cached_tokens == alone.num_cached_tokens == 64
        assert output.kv_transfer_params["remote_private_block"] == 1
        with LLM(**SMALL, **role("kv_consumer"), kv_peers=(first.engine.config.share.kv_share,)) as second:
            (found,) = second.generate(asked, params(40, output.kv_transfer_params), use_tqdm=False)
            assert found.outputs[0].token_ids == alone.outputs[0].token_ids and found.num_cached_tokens == 96
            (other,) = second.generate(asked, params(40), use_tqdm=False)
            assert other.num_cached_tokens == 16 and other.outputs[0].token_ids == whole.outputs[0].token_ids
            second.engine.core.check()
            until(lambda: not leases(first))  # the decode node tells with its next word, if it still lives then

"""Engines that read each other's blocks: tokens are those of an engine alone, whatever happens to the connection."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kvnet import block_peers, block_share

from ..support.addresses import free_address
from ..support.features import mover_of
from ..support.planted_faults import PAGE_FAULTS, plant_lines
from .test_tiers import PARAMS, PROMPTS, SMALL, TIERS

KEY = "a key that both engines know"


@pytest.fixture(autouse=True, params=["memory"])
def key(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)
    if request.param == "tcp":
        monkeypatch.setattr(block_share.BlockLine, "near", False)


def ask(llm: LLM) -> tuple[list[list[int]], list[int], list[set[Tier]]]:
    """Return the tokens, the number of cached tokens and the tiers of every prompt, one after the other."""
    outputs = [llm.generate(*one, use_tqdm=False)[0] for one in zip(PROMPTS, PARAMS, strict=True)]
    llm.engine.core.check()
    flush(llm.engine.core)
    tiers = [{origin.tier for origin in one.metrics.origins.values()} if one.metrics else set() for one in outputs]
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens or 0 for one in outputs], tiers


def peers_of(llm: LLM) -> Any:
    return llm.engine.core.scheduler.roster.store.sharing._promises


def stats(llm: LLM) -> Any:
    return llm.engine.core.state().stats.tiers[Tier.PEER]


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def know(reader: LLM, sharer: LLM) -> None:
    """Wait until `reader` knows all blocks of `sharer`."""
    until(lambda: peers_of(reader)._peers[0].keys == set(sharer.engine.core.scheduler.roster.store.host._index))


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        return ask(llm)[0]


@pytest.fixture(scope="module")
def sharer(truth: list[list[int]]) -> Iterator[LLM]:
    """An engine that has answered all prompts and shares their blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_KEY", KEY)
        with LLM(**SMALL | TIERS, kv_share=free_address()) as llm:
            assert ask(llm)[0] == truth
            yield llm


@pytest.fixture
def read(sharer: LLM) -> Callable[..., LLM]:
    """Makes an engine that reads the blocks of `sharer`, and knows them all."""

    def reader(**options: Any) -> LLM:
        llm = LLM(**SMALL | TIERS | options, kv_peers=(sharer.engine.config.share.kv_share,))
        know(llm, sharer)
        return llm

    return reader


@pytest.mark.parametrize("key", ["tcp", "memory"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"async_depth": 2, "kv_offload_policy": "lazy"}], ids=str)
def test_tokens_are_those_without_peers(truth: list[list[int]], read: Any, options: dict[str, Any]) -> None:
    with read(**options) as reader:
        tokens, cached, tiers = ask(reader)
        assert tokens == truth and min(cached) >= 64, cached
        assert tiers == [{Tier.PEER}] * 4
        assert stats(reader).num_loaded >= 16 and stats(reader).num_failed == 0
        assert stats(reader).loaded_bytes == stats(reader).num_loaded * mover_of(reader.engine.worker).host.shape[1]
        assert reader.reset_prefix_cache()
        tokens, cached, _ = ask(reader)
        assert tokens == truth and not any(cached), "what peers had then is forgotten"


def test_faults_cost_no_token(truth: list[list[int]], sharer: LLM, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    plant_lines(monkeypatch, "page=" + "/".join(f"{fault}/ok/ok" for fault in PAGE_FAULTS))
    with read() as reader:
        for _ in range(3):
            assert ask(reader)[0] == truth
            reader.reset_prefix_cache()
            peers_of(reader)._peers[0]._line.close()  # what it has is told again
            know(reader, sharer)
        assert stats(reader).num_failed and stats(reader).num_loaded


def test_a_share_that_dies_between_pages_costs_no_token(
    truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_lines(monkeypatch, "page=ok/corrupt/ok/killed", "hear=" + "ok/" * 9 + "killed")
    with LLM(**SMALL | TIERS, kv_share=(place := free_address())) as sharer:
        assert ask(sharer)[0] == truth
        with LLM(**SMALL | TIERS, kv_peers=(place,)) as reader:
            know(reader, sharer)
            assert ask(reader)[0] == truth and stats(reader).num_failed


def test_pages_of_zeros_are_noticed(truth: list[list[int]], read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above turn red when loads bring nothing."""
    receive = block_share.BlockLine.receive_page

    def zeros(self: Any, key: bytes, parts: Any, *rest: Any) -> bool:
        good = receive(self, key, parts, *rest)
        for part in parts:
            part[:] = bytes(len(part))
        return good

    monkeypatch.setattr(block_share.BlockLine, "receive_page", zeros)
    with read() as reader:
        assert ask(reader)[0] != truth

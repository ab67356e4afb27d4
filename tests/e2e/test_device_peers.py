"""Engines that copy each other's blocks from device to device: tokens are those of an engine alone, whatever happens.

The devices are CPUs whose memory other processes can map, as those of GPUs; `tests/gpu/test_ipc.py` has real ones.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM
from quire.contracts.step import Tier
from quire.kvnet import block_peers, block_share, device_peers

from ..support.addresses import free_address
from ..support.features import mover_of
from ..support.planted_faults import plant_lines
from ..support.shared_ipc import SharedIpc, share_devices
from .test_peers import ask, know, until
from .test_tiers import PARAMS, PROMPTS, SMALL, TIERS

SPACE = SMALL | {"num_gpu_blocks_override": 60}  # all prompts stay on the device
KEY = "a key that both engines know"


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_KEY", KEY)
        patch.setattr(block_share, "BEAT_SECONDS", 0.1)
        patch.setattr(device_peers, "BEAT_SECONDS", 0.1)
        share_devices(patch)
        yield


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        return ask(llm)[0]


@pytest.fixture(scope="module")
def sharer(truth: list[list[int]]) -> Iterator[LLM]:
    """An engine that has answered all prompts and has their blocks on its device."""
    with LLM(**SPACE | TIERS, kv_share=free_address()) as llm:
        assert ask(llm)[0] == truth
        yield llm


def stats(llm: LLM, tier: Tier = Tier.CUDA_IPC) -> Any:
    return llm.engine.core.state().stats.tiers[tier]


@pytest.fixture
def read(sharer: LLM) -> Callable[..., LLM]:
    """Makes an engine that reads the blocks of `sharer`, and knows those on its device and in its host memory."""

    def reader(**options: Any) -> LLM:
        llm = LLM(**SMALL | TIERS | options, kv_peers=(sharer.engine.config.share.kv_share,))
        store, theirs = llm.engine.core.scheduler.roster.store, sharer.engine.core.scheduler.roster.store
        for tier, pool in zip(store.blocks.below, (theirs._pool, theirs.host), strict=True):
            until(lambda tier=tier, pool=pool: tier._peers[0].keys == set(pool._index))
        return llm

    return reader


@pytest.mark.parametrize("options", [{}, {"async_depth": 2, "kv_offload_policy": "lazy"}], ids=str)
def test_tokens_are_those_without_peers(truth: list[list[int]], read: Any, options: dict[str, Any]) -> None:
    with read(**options) as reader:
        tokens, cached, tiers = ask(reader)
        assert tokens == truth and min(cached) >= 64 and tiers == [{Tier.CUDA_IPC}] * 4
        found = stats(reader)
        assert found.num_loaded >= 16 and found.num_failed == 0 and stats(reader, Tier.PEER).num_loaded == 0
        assert found.loaded_bytes == found.num_loaded * mover_of(reader.engine.worker).host.shape[1]
        assert SharedIpc.mapped
    del reader
    until(lambda: not SharedIpc.mapped)


def test_the_peer_of_each_block_is_named(sharer: LLM, read: Any) -> None:
    with read() as reader:
        (output,) = reader.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
        found = {(origin.tier, origin.peer) for origin in output.metrics.origins.values()}
        assert found == {(Tier.CUDA_IPC, sharer.engine.config.share.kv_share)}


def test_copies_of_zeros_are_noticed(truth: list[list[int]], read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above turns red when copies bring nothing."""
    monkeypatch.setattr(SharedIpc, "copy", lambda self, moves: [*moves])
    with read() as reader:
        assert ask(reader)[0] != truth


def test_memory_that_cannot_be_mapped_is_read_through_the_host(
    truth: list[list[int]], read: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SharedIpc, "refused", "another container")
    with read() as reader:
        tokens, cached, _ = ask(reader)
        assert tokens == truth and min(cached) >= 64
        assert stats(reader, Tier.PEER).num_loaded >= 16 and stats(reader).num_loaded == 0
    assert caplog.text.count("cannot be mapped (another container)") == 1


def test_memory_that_cannot_be_exported_is_read_through_the_host(
    truth: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("expandable")

    monkeypatch.setattr(SharedIpc, "export", refused)
    with LLM(**SPACE | TIERS, kv_share=(place := free_address())) as sharer:
        assert ask(sharer)[0] == truth and "cannot map the GPU memory of this one (expandable;" in caplog.text
        with LLM(**SMALL | TIERS, kv_peers=(place,)) as reader:
            know(reader, sharer)
            tokens, _, tiers = ask(reader)
            assert tokens == truth and tiers == [{Tier.PEER}] * 4


def test_faults_cost_no_token(truth: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    plant_lines(monkeypatch, "hear=ok/ok/ok/ok/ok/ok/ok/killed", "tell=ok/ok/ok/ok/ok/ok/ok/ok/killed/slow")
    with LLM(**SPACE | TIERS, kv_share=(place := free_address())) as sharer:
        assert ask(sharer)[0] == truth
        with LLM(**SMALL | TIERS, kv_peers=(place,)) as reader:
            for _ in range(4):
                assert ask(reader)[0] == truth
                reader.reset_prefix_cache()


def test_blocks_that_leave_during_the_copy_cost_no_token(
    truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(**SPACE | TIERS, kv_share=(place := free_address())) as sharer:
        assert ask(sharer)[0] == truth
        theirs = sharer.engine.core.scheduler.roster.store
        with LLM(**SMALL | TIERS, kv_peers=(place,)) as reader:
            devices = reader.engine.core.scheduler.roster.store.blocks.below[0]
            until(lambda: devices._peers[0].keys == set(theirs._pool._index))
            pages = mover_of(sharer.engine.worker)._arena.pages

            def overwritten() -> None:
                sharer.reset_prefix_cache()
                pages[1:] = 7

            monkeypatch.setattr(SharedIpc, "on_copy", [overwritten])
            assert ask(reader)[0] == truth and stats(reader).num_failed and not stats(reader).num_loaded

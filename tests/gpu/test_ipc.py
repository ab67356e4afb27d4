"""Blocks of an engine's GPU memory that another process maps: two processes on one GPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kernels.ipc import CudaIpc
from quire.kvnet.block_peers import BlockPeers
from quire.kvnet.device_peers import PeerDevices

from ..support.addresses import free_address
from ..support.engines import store_of, tier_stats
from ..support.features import mover_of
from . import children
from .test_engine import TEXTS, make

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key that both engines know"
SMALL = {
    "num_gpu_blocks_override": 60,
    "block_size": 16,
    "max_model_len": 192,
    "max_num_seqs": 3,
    "kv_offload_gb": 0.02,
    "kv_offload_policy": "write_through",
}
PROMPTS = [f"{text}. " * 14 for text in TEXTS]
SECONDS = 180


class Child:
    """A process that runs a program of `children.py`."""

    def __init__(self, program: Callable[..., None], *arguments: str, **environment: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", children.__name__, program.__name__, *arguments],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "QUIRE_CLUSTER_KEY": KEY} | environment,
        )

    def answer(self) -> Any:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other process has ended with {self.process.wait(SECONDS)}: see its output above"
        return json.loads(line)

    def ask(self) -> Any:
        """Have it go on, and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("on\n")
        self.process.stdin.flush()
        return self.answer()


@contextmanager
def child(program: Callable[..., None], *arguments: str, **environment: str) -> Iterator[Child]:
    """A process that is ended at the end."""
    one = Child(program, *arguments, **environment)
    try:
        yield one
    finally:
        with suppress(OSError):
            one.process.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(30)
        one.process.kill()
        one.process.wait()


def params() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True) for _ in PROMPTS]


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_memory_of_another_process_is_mapped_and_copied(device: torch.device) -> None:
    """The handle layer alone: export there, open, copy and close here."""
    page = 1 << 20
    with child(children.own_memory) as owner:
        (handle, offset), (rest, rest_offset) = owner.answer()
        ipc, mine = CudaIpc(device), torch.full((6, page), 255, dtype=torch.uint8, device=device)
        address = ipc.open(bytes.fromhex(handle))
        moves = [(mine[5 - i].data_ptr(), address + offset + i * page, page) for i in range(5)]
        ipc.copy(moves)
        expected = torch.arange(6 * page, device=device).remainder(251).to(torch.uint8).view(6, page)
        for i in range(5):
            assert torch.equal(mine[5 - i], expected[i]), f"page {i}"
        assert (mine[0] == 255).all(), "nothing else is written"
        other = ipc.open(bytes.fromhex(rest))
        ipc.copy([(mine.data_ptr(), other + rest_offset, 5 << 10)])
        assert (mine[0][: 5 << 10] == 0).all() and (mine[0][5 << 10 :] == 255).all()
        for one in (address, other):
            ipc.close(one)
        address = ipc.open(bytes.fromhex(handle))
        ipc.copy([(mine.data_ptr(), address + offset, page)])
        assert torch.equal(mine[0], expected[0]), "it is mapped anew"
        ipc.close(address)
        with pytest.raises(OSError, match="a handle of 3 bytes"):
            ipc.open(b"abc")
    assert torch.equal(mine[5], expected[0]), "the owner is gone, the copy is ours"


def test_mapped_memory_outlives_its_owner(device: torch.device) -> None:
    with child(children.own_memory) as owner:
        (handle, offset), _ = owner.answer()
        ipc, mine = CudaIpc(device), torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        address = ipc.open(bytes.fromhex(handle))
        owner.process.kill()
        owner.process.wait()
        ipc.copy([(mine.data_ptr(), address + offset, mine.numel())])  # anything, and no error
        ipc.close(address)
        torch.cuda.synchronize()


def test_memory_of_this_process_cannot_be_mapped_by_itself(device: torch.device) -> None:
    ipc, pages = CudaIpc(device), torch.zeros(1 << 22, dtype=torch.uint8, device=device)
    handle, offset = ipc.export(pages)
    assert len(handle) == 64 and 0 <= offset
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2"):
        ipc.open(handle)


def tiers_below(llm: LLM) -> tuple[BlockPeers, BlockPeers]:
    """Return the tiers of other engines' GPUs and of their host memory, the nearest first."""
    devices, peers = store_of(llm).blocks.below
    assert isinstance(devices, BlockPeers) and isinstance(peers, BlockPeers)
    return devices, peers


def ask(llm: LLM) -> tuple[list[list[int]], list[int], set[Tier]]:
    """Return the tokens, the numbers of cached tokens, and the tiers of the blocks."""
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    llm.engine.core.check()
    tiers = {origin.tier for one in outputs if one.metrics for origin in one.metrics.origins.values()}
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens or 0 for one in outputs], tiers


def test_tokens_of_an_engine_that_copies_from_another_on_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)
    place = free_address()
    with child(children.own_blocks, place) as owner:
        tokens, keys = owner.answer()
        with make(bundled_model(), **SMALL, kv_peers=(place,)) as llm:
            devices, peers = tiers_below(llm)
            assert (devices.tier, peers.tier) == (Tier.CUDA_IPC, Tier.PEER)
            until(lambda: devices._peers[0].keys >= set(map(bytes.fromhex, keys)))
            found, cached, tiers = ask(llm)
            assert found == tokens and max(cached) >= 48 and tiers == {Tier.CUDA_IPC}, (cached, tiers)
            ipc, mover = tier_stats(llm, Tier.CUDA_IPC), mover_of(llm.engine.worker)
            assert mover is not None and isinstance(mover._devices, PeerDevices)
            link = mover._devices._links[0]
            assert ipc.num_loaded >= 9 and not ipc.num_failed and not tier_stats(llm, Tier.PEER).num_loaded
            assert ipc.loaded_bytes == ipc.num_loaded * mover.host.shape[1]
            assert link._pages
            assert owner.ask() is True, "it forgets its blocks"
            until(lambda: not devices._peers[0].keys)
            assert llm.reset_prefix_cache()
            found, cached, _ = ask(llm)
            assert found == tokens and not any(cached)
            owner.process.kill()
            owner.process.wait()
            until(lambda: not link._pages)
            assert llm.reset_prefix_cache() and ask(llm)[0] == tokens
            store = store_of(llm)
            flush(llm.engine.core)
            store.check()
            assert not store.held() and not store.blocks.jobs.running, "nothing is left"


def test_memory_of_expandable_segments_is_read_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)
    place = free_address()
    with child(children.own_blocks, place, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as owner:
        tokens, keys = owner.answer()
        with make(bundled_model(), **SMALL, kv_peers=(place,)) as llm:
            devices, peers = tiers_below(llm)
            until(lambda: peers._peers[0].keys >= set(map(bytes.fromhex, keys)))
            found, cached, tiers = ask(llm)
            assert found == tokens and max(cached) >= 48 and tiers == {Tier.PEER}
            assert not devices._peers[0].keys and not tier_stats(llm, Tier.CUDA_IPC).num_failed

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

from ..support.addresses import free_address
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

# Each child writes a line of JSON for each line that it reads; other output goes to standard error.
OWNER_OF_MEMORY = """
import torch
from quire.kernels.ipc import CudaIpc
device = torch.device("cuda", 0)
torch.zeros(3 << 20, dtype=torch.uint8, device=device)
rest = torch.zeros((5, 1 << 10), dtype=torch.uint8, device=device)  # shares an allocation of the driver with others
pages = torch.arange(6 << 20, device=device).remainder(251).to(torch.uint8)
torch.cuda.synchronize()
ipc = CudaIpc(device)
tell([[handle.hex(), offset] for handle, offset in map(ipc.export, (pages, rest))])
hear()
"""

OWNER_OF_BLOCKS = """
from quire import SamplingParams
from quire.config.bundled import bundled_model
from quire.engine.replicas import flush
from tests.gpu.test_engine import make
from tests.gpu.test_ipc import PROMPTS, SMALL, params
with make(bundled_model(), **SMALL, kv_share=ARGUMENT) as llm:
    tokens = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params(), use_tqdm=False)]
    flush(llm.engine.core)
    store = llm.engine.core.scheduler.roster.store
    tell([tokens, [key.hex() for key in store._pool._index]])
    while hear():
        llm.reset_prefix_cache()
        tell(True)
"""

CHILD = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def tell(value):
    print(json.dumps(value), file=answers, flush=True)
def hear():
    return sys.stdin.readline().strip()
ARGUMENT = sys.argv[1]
"""


class Child:
    """A process that runs a script."""

    def __init__(self, script: str, argument: str = "", **environment: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD + script, argument],
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
def child(script: str, argument: str = "", **environment: str) -> Iterator[Child]:
    """A process that is ended at the end."""
    one = Child(script, argument, **environment)
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
    with child(OWNER_OF_MEMORY) as owner:
        (handle, offset), (rest, rest_offset) = owner.answer()
        ipc, mine = CudaIpc(device), torch.full((6, page), 255, dtype=torch.uint8, device=device)
        address = ipc.open(bytes.fromhex(handle))
        moves = [(mine[5 - i].data_ptr(), address + offset + i * page, page) for i in range(5)]
        ipc.copy(moves, ipc.mark())
        expected = torch.arange(6 * page, device=device).remainder(251).to(torch.uint8).view(6, page)
        for i in range(5):
            assert torch.equal(mine[5 - i], expected[i]), f"page {i}"
        assert (mine[0] == 255).all(), "nothing else is written"
        other = ipc.open(bytes.fromhex(rest))
        ipc.copy([(mine.data_ptr(), other + rest_offset, 5 << 10)], ipc.mark())
        assert (mine[0][: 5 << 10] == 0).all() and (mine[0][5 << 10 :] == 255).all()
        for one in (address, other):
            ipc.close(one)
        address = ipc.open(bytes.fromhex(handle))
        ipc.copy([(mine.data_ptr(), address + offset, page)], ipc.mark())
        assert torch.equal(mine[0], expected[0]), "it is mapped anew"
        ipc.close(address)
        with pytest.raises(OSError, match="a handle of 3 bytes"):
            ipc.open(b"abc")
    assert torch.equal(mine[5], expected[0]), "the owner is gone, the copy is ours"


def test_mapped_memory_outlives_its_owner(device: torch.device) -> None:
    with child(OWNER_OF_MEMORY) as owner:
        (handle, offset), _ = owner.answer()
        ipc, mine = CudaIpc(device), torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        address = ipc.open(bytes.fromhex(handle))
        owner.process.kill()
        owner.process.wait()
        ipc.copy([(mine.data_ptr(), address + offset, mine.numel())], ipc.mark())  # anything, and no error
        ipc.close(address)
        torch.cuda.synchronize()


def test_memory_of_this_process_cannot_be_mapped_by_itself(device: torch.device) -> None:
    ipc, pages = CudaIpc(device), torch.zeros(1 << 22, dtype=torch.uint8, device=device)
    handle, offset = ipc.export(pages)
    assert len(handle) == 64 and 0 <= offset
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2"):
        ipc.open(handle)


def stats(llm: LLM, tier: Tier) -> Any:
    flush(llm.engine.core)
    return llm.engine.core.state().stats.tiers[tier]


def ask(llm: LLM) -> tuple[list[list[int]], list[int], set[Tier]]:
    """Return the tokens, the numbers of cached tokens, and the tiers of the blocks."""
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    llm.engine.core.check()
    tiers = {origin.tier for one in outputs if one.metrics for origin in one.metrics.origins.values()}
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens or 0 for one in outputs], tiers


def test_tokens_of_an_engine_that_copies_from_another_on_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)
    place = free_address()
    with child(OWNER_OF_BLOCKS, place) as owner:
        tokens, keys = owner.answer()
        with make(bundled_model(), **SMALL, kv_peers=(place,)) as llm:
            devices, peers = llm.engine.core.scheduler.roster.store._below
            assert (devices.tier, peers.tier) == (Tier.CUDA_IPC, Tier.PEER)
            until(lambda: devices._peers[0].keys >= set(map(bytes.fromhex, keys)))
            found, cached, tiers = ask(llm)
            assert found == tokens and max(cached) >= 48 and tiers == {Tier.CUDA_IPC}, (cached, tiers)
            ipc, link = stats(llm, Tier.CUDA_IPC), llm.engine.worker.mover._devices._links[0]
            assert ipc.num_loaded >= 9 and not ipc.num_failed and not stats(llm, Tier.PEER).num_loaded
            assert ipc.loaded_bytes == ipc.num_loaded * llm.engine.worker.mover.host.shape[1]
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
            store = llm.engine.core.scheduler.roster.store
            flush(llm.engine.core)
            store.check()
            assert not store.held() and not store._jobs.running, "nothing is left"


def test_memory_of_expandable_segments_is_read_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", KEY)
    place = free_address()
    with child(OWNER_OF_BLOCKS, place, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as owner:
        tokens, keys = owner.answer()
        with make(bundled_model(), **SMALL, kv_peers=(place,)) as llm:
            devices, peers = llm.engine.core.scheduler.roster.store._below
            until(lambda: peers._peers[0].keys >= set(map(bytes.fromhex, keys)))
            found, cached, tiers = ask(llm)
            assert found == tokens and max(cached) >= 48 and tiers == {Tier.PEER}
            assert not devices._peers[0].keys and not stats(llm, Tier.CUDA_IPC).num_failed

"""Sleep and new weights on a GPU: captured graphs go on at their addresses, and the driver has the memory meanwhile.

Memory is what the driver made for this process: tests of other processes use the same GPU.
"""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.errors import EngineAsleep
from quire.kernels.driver import call_driver
from quire.kernels.virtual_memory import CHUNK_BYTES, IMPLEMENTATIONS, CudaVirtualMemory, MappedRange

from ..support.gpu_memory import held_here
from ..support.quantized_checkpoints import two_checkpoints
from .test_engine import make

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 4000, "block_size": 16}
LIFE: dict[str, Any] = {"enable_sleep_mode": True, "weight_transfer_config": {"backend": "files"}}
PROMPTS = [{"prompt_token_ids": [(7 * i + s) % 90 + 1 for i in range(40)]} for s in range(3)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
MIB = 1 << 20
LOADED = 64 * MIB  # kernels that the driver loads meanwhile, at most


class Counted(CudaVirtualMemory):
    """Counts the physical memory that the driver made and did not free.

    made   handle -> bytes
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.made: dict[int, int] = {}

    @property
    def held(self) -> int:
        return sum(self.made.values())

    def create(self, size: int) -> int:
        handle = super().create(size)
        self.made[handle] = size
        return handle

    def release(self, handle: int) -> None:
        super().release(handle)
        del self.made[handle]


def is_backed(address: int) -> bool:
    """Return True if the driver has physical memory behind an address."""
    handle = ctypes.c_uint64()
    try:
        call_driver("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    except OSError:
        return False
    call_driver("cuMemRelease", handle)
    return True


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_ranges_of_the_driver_keep_addresses_and_give_all_memory_back(device: torch.device) -> None:
    memory = Counted(device)
    made = MappedRange(memory, 700 * MIB + 1)  # two chunks
    made.back()
    view = made.view(made.size)
    at = view.data_ptr()
    view.fill_(7)
    assert int(view[-1]) == 7 and memory.held == made.size == made.backed
    chunks = range(at, at + made.size, CHUNK_BYTES)
    assert all(map(is_backed, chunks))
    made.drop()
    assert memory.held == made.backed == 0 and not any(map(is_backed, chunks))
    made.back()
    view.fill_(9)
    assert view.data_ptr() == at and int(view.max()) == int(view.min()) == 9
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, device=device, dtype=torch.int64)
    total.copy_(view[:64].sum())
    with torch.cuda.graph(graph):
        total.copy_(view[:64].sum())
    made.drop()
    made.back()
    view.fill_(3)
    graph.replay()
    assert int(total) == 3 * 64, "a captured graph reads the memory of today"
    del view, made, graph
    gc.collect()
    assert memory.held == 0 and not any(map(is_backed, chunks))


def test_the_driver_counts_less_without_a_range(device: torch.device) -> None:
    memory = CudaVirtualMemory(device)
    before = held_here()
    made = MappedRange(memory, 700 * MIB)
    made.back()
    assert held_here() - before >= 700 * MIB
    made.drop()
    assert held_here() - before <= LOADED


@pytest.mark.parametrize(
    ("family", "form", "options"),
    [
        ("qwen3", "", {}),
        ("qwen3", "", {"enforce_eager": True}),
        ("qwen3_moe", "", {}),
        ("deepseek_v3", "", {}),
        ("qwen3_next", "", {}),
        ("qwen3", "fp8-block", {}),
        ("qwen3", "ct-w4-group", {}),
        ("qwen3", "", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ("qwen3", "", {"kv_offload_gb": 0.05}),
    ],
    ids=str,
)
def test_tokens_over_sleep_and_new_weights(
    family: str, form: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[Counted] = []

    def counted(device: torch.device) -> Counted:
        memories.append(Counted(device))
        return memories[-1]

    monkeypatch.setitem(IMPLEMENTATIONS, "cuda", counted)
    folders = two_checkpoints(family, form, 64, tmp_path)
    given = SMALL | {"skip_tokenizer_init": True} | ({"dtype": "bfloat16"} if form else {}) | options
    with make(folders[1], **given) as llm:
        expected = tokens(llm)
    with make(folders[0], **given, **LIFE) as llm:
        old = tokens(llm)
        for level in (1, 2):
            before = [memory.held for memory in memories]
            assert sum(before)
            llm.sleep(level)
            assert not any(memory.held for memory in memories), "memory went back to the driver"
            with pytest.raises(EngineAsleep):
                tokens(llm)
            llm.wake_up()
            assert [memory.held for memory in memories] == before and tokens(llm) == old
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(folders[1])}})
        llm.finish_weight_update()
        assert tokens(llm) == expected
        llm.sleep(1)
        llm.wake_up()
        assert tokens(llm) == expected


def test_the_measurement_runs(tmp_path: Path) -> None:
    """The command of docs/log.md, on a small model."""
    tool = Path(__file__).parents[2] / "tools" / "measure_sleep.py"
    done = subprocess.run([sys.executable, str(tool), "--small"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "asleep" in done.stdout

"""Facts about the GPU, its kernel cache, and weights on their way to it."""

import os
import time
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels.compile_cache import compiling_ahead
from quire.kernels.triton_runtime import jit, tl
from quire.layers.decoder import Decoder
from quire.plan.layout import layout
from quire.platforms.cuda import CudaFacts, read_cuda_facts
from quire.platforms.detect import probe_driver, resolve_device
from quire.weights.dummy import load_dummy
from quire.weights.load import load_weights
from quire.worker.graphs import Graphs

from ..support.filled_models import Taken, stored_tensors
from ..support.gpu_memory import held_by, held_by_process, held_here
from . import children
from .test_ipc import child

QUIET_SECONDS = 120  # in which no other process changes its memory for a moment
CONFIG = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def model_of(taken: Taken) -> Decoder:
    """The stand-in as what loaders take."""
    return cast(Decoder, taken)


def build(device: str, dtype: str, **changes: int) -> Taken:
    args = parse_checkpoint_config(CONFIG | changes)
    return Taken(args, layout(args), getattr(torch, dtype), device)


def test_the_driver_and_torch_see_the_same_gpu(facts: CudaFacts) -> None:
    probe = probe_driver()
    assert not probe.missing and probe.capability == facts.capability
    assert resolve_device("auto").device == "cuda"
    print(facts)


def test_facts_are_plausible(facts: CudaFacts) -> None:
    assert 0 < facts.free_memory <= facts.total_memory and facts.num_sms > 0
    assert facts.driver_version != "unknown" and facts.others_memory is not None
    assert 0 <= facts.others_memory < facts.total_memory


def test_what_other_processes_hold_is_counted(facts: CudaFacts, device: torch.device) -> None:
    """The memory of all processes but this one, between two looks at the driver's list that say the same.

    Tests in other processes take and free memory meanwhile, so that some looks differ.
    """
    own = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    with child(children.hold, str(1 << 30)) as other:
        assert other.answer() == 1 << 30
        assert held_by(other.process.pid) >= 1 << 30 and held_here() >= own.numel()
        end = time.monotonic() + QUIET_SECONDS
        while True:
            before = held_by_process()
            found = read_cuda_facts()
            if held_by_process() == before:
                break
            assert time.monotonic() < end, "the memory of other processes never stays the same"
    assert found.others_memory == sum(used for pid, used in before.items() if pid != os.getpid())
    assert found.free_memory + sum(before.values()) <= found.total_memory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("chunk", "threads"), [(1 << 20, 8), (100_000, 3), (8 << 20, 1)])
@pytest.mark.parametrize("load_device", ["cpu", "cuda"])
def test_loaded_weights_are_the_cpu_s(tmp_path: Path, dtype: str, chunk: int, threads: int, load_device: str) -> None:
    expected, model = build("cpu", dtype), build("cuda", dtype)
    stored = {name: tensor.bfloat16() for name, tensor in stored_tensors(expected.layout).items()}
    save_file(stored, tmp_path / "model.safetensors")
    load_weights(model_of(expected), tmp_path)
    print(
        load_weights(
            model_of(model), tmp_path, device=torch.device(load_device), chunk_bytes=chunk, num_threads=threads
        )
    )
    for name, tensor in expected.tensors.items():
        assert torch.equal(tensor, model.tensors[name].cpu()), name


def test_the_rate_from_the_page_cache(tmp_path: Path) -> None:
    big = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128}
    stored = {
        part.stored: torch.zeros(part.shape, dtype=torch.bfloat16)
        for param in build("cuda", "bfloat16", **big).layout
        for part in param.parts
    }
    save_file(stored, tmp_path / "model.safetensors")
    for threads in (1, 2, 4, 8, 16):
        models = [build("cuda", "bfloat16", **big) for _ in range(2)]
        print(
            threads,
            "threads:",
            min(
                (load_weights(model_of(model), tmp_path, num_threads=threads) for model in models),
                key=lambda report: report.seconds,
            ),
        )
        assert not any(tensor.any() for model in models for tensor in model.tensors.values())


def test_dummy_weights_are_the_same_on_both() -> None:
    one, other = build("cpu", "bfloat16"), build("cuda", "bfloat16")
    load_dummy(model_of(one), 3)
    load_dummy(model_of(other), 3)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name].cpu()), name


def test_a_kernel_compiled_ahead_is_not_compiled_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(1000, device=device), torch.full((1000,), float("nan"), device=device)
    with compiling_ahead() as ahead:
        scale_kernel[(8,)](x, y, 1000, 2.5, BLOCK=128)
    assert y.isnan().all(), "nothing runs inside"
    assert (ahead.report().num_kernels, ahead.report().failed) == (1, ())
    print(ahead.report())
    monkeypatch.setattr(scale_kernel, "compile", lambda *a, **k: pytest.fail("compiled at its launch"), raising=False)
    scale_kernel[(8,)](x, y, 1000, 2.5, BLOCK=128)
    assert torch.equal(y, x * 2.5)


def test_a_kernel_that_no_rehearsal_foresaw_is_captured(device: torch.device) -> None:
    """It is compiled and loaded in the middle of the capture, among kernels that were not."""
    x, y, z = (torch.full((1000,), value, device=device) for value in (3.0, float("nan"), float("nan")))
    scale_kernel[(16,)](x, y, 1000, 2.5, BLOCK=64)

    def work() -> None:
        scale_kernel[(16,)](x, y, 1000, 2.5, BLOCK=64)
        scale_kernel[(32,)](y, z, 1000, 0.5, BLOCK=32)

    graphs = Graphs()
    graphs.capture(("decode", 1, 0), work)
    x.fill_(4.0)
    graphs.run(("decode", 1, 0), lambda: pytest.fail("was not captured"))
    assert (z == 5.0).all()

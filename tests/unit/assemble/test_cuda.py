"""The GPU's half of the composition root, as far as it can be had without a GPU."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.args.checkpoint import read_checkpoint_config
from quire.assemble import cuda
from quire.assemble.loaded import Outside, Parts
from quire.bench.workload import model_folder
from quire.config.bundled import bundled_model
from quire.config.engine import CacheConfig, EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import SAMPLE, Admission, StepPlan
from quire.distributed.mesh import ALONE
from quire.kernels.index.triton_select import WHOLE
from quire.kernels.select import KernelNeeds, here, select
from quire.kernels.step.state import Exchanges, Limits
from quire.kernels.supports import SUPPORTS
from quire.plan.dtype import DTypePlan
from quire.plan.engine import Machine, ModelFacts, resolve_engine
from quire.plan.kinds.latent import LATENT_CONTEXT
from quire.plan.sizing import resolve_sizing
from quire.platforms.cuda import CudaFacts

from ...support.late_copies import apart

GIB = 1 << 30
FACTS = CudaFacts(
    name="NVIDIA T",
    capability=(9, 0),
    num_sms=2,
    total_memory=16 * GIB,
    free_memory=15 * GIB,
    others_memory=0,
    driver_version="1",
    runtime_version="2",
    torch_version="3",
)


def facts_of(folder: Path) -> ModelFacts:
    return ModelFacts(folder=folder, args=read_checkpoint_config(folder), dtype=DTypePlan(dtype="float32", reason=""))


def assemble(monkeypatch: pytest.MonkeyPatch, facts: CudaFacts = FACTS, why: str = "", **options: object) -> Parts:
    """A plan for this CPU, built as on a GPU."""
    monkeypatch.setattr(cuda, "missing", lambda: why)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 16 * GIB))
    folder = bundled_model()
    config = EngineConfig.from_flat(max_num_seqs=4, max_model_len=64, **options)
    machine = Machine(device="cpu", words="NVIDIA T", total_memory=facts.total_memory)
    plan = resolve_engine(config, facts_of(folder), machine, here)
    loaded = cuda.load_cuda(plan, ALONE, facts, on_loading=lambda done, total: None, end_phase=lambda name: None)
    return loaded.finish(resolve_sizing(plan, loaded.measure()), Outside())


def test_without_triton_a_gpu_runs_pytorch_s_operations_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assemble(monkeypatch, why="there is no abacus")
    assert "graphs" not in parts.plans
    (note,) = parts.notes
    assert "no Triton kernel can run (there is no abacus)" in note and "slower" in note
    facts = ExecutorFacts(
        depth=1,
        decode_lag=1,
        num_slots=4,
        num_blocks=8,
        block_size=32,
        max_model_len=64,
        vocab_size=parts.plan.args.vocab_size,
    )
    executor = parts.executor(facts)
    prompt = Admission(
        slot=1,
        request_id="",
        token_ids=np.arange(5, dtype=np.int32),
        num_computed=0,
        block_ids=(np.array([1], np.int32),),
        sampler=SamplerSpec(seed=0, num_prompt=5),
    )
    one = np.array([1], np.int32)
    executor.submit(
        StepPlan(
            step=1,
            slots=one,
            num_decodes=0,
            num_tokens=5 * one,
            num_rows=one,
            admitted=(prompt,),
            outputs=np.array([SAMPLE], np.uint8),
        )
    )
    assert executor.collect().tokens.shape == (1, 1)
    executor.shutdown()


@pytest.mark.parametrize("op", SUPPORTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_triton_every_operation_has_what_runs_on_a_gpu(op: str, dtype: str) -> None:
    choice = select(op, KernelNeeds(device="cuda", dtype=dtype), probe=lambda need: "there is no abacus")
    assert choice.name in ("ref", "grouped") or op == "linear"
    alone = sum("cuda" in one.devices for one in SUPPORTS[op].values()) == 1
    assert choice.features == ("add", "exact", "out") if op == "linear" else alone or "abacus" in str(choice)


@pytest.mark.parametrize("why", ["", "there is no abacus"])
def test_a_model_that_cannot_fit_is_refused_before_any_of_it_is_there(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    small = replace(FACTS, total_memory=GIB, free_memory=1 << 20, others_memory=None)
    built: list[str] = []
    monkeypatch.setattr(cuda, "build_model", lambda plan, tp: built.append(plan.folder))
    with pytest.raises(ConfigError, match=r"the weights need .* in float32.* are missing. Try "):
        assemble(monkeypatch, small, why)
    assert not built


def test_weights_in_host_memory_are_not_counted_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of eight layers leave it, but for the two slots. A GPU that runs PyTorch's operations has them, too."""
    counted = list[int]()
    made = apart(monkeypatch, 2)
    monkeypatch.setattr(cuda, "check_weights", lambda weights, *given, **more: counted.append(weights))
    for gib in (0.0, 0.009):
        parts = assemble(monkeypatch, why="there is no abacus", load_format="dummy", cpu_offload_gb=gib)
        assert parts.model is not None and (parts.model.streamed is not None) == (gib > 0) == (len(made) > 0)
    assert counted[0] - counted[1] == (4 - 2) * 3 << 20


def test_a_step_that_finds_no_memory_names_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "_rehearse", full)
    with pytest.raises(ConfigError, match=r"8192 tokens and 4 seq.* 15.00 GiB.* --max-num-seqs 1 .*-tokens 2048"):
        assemble(monkeypatch, load_format="dummy")


def test_the_memory_of_graphs_holds_the_experts_part_of_the_largest_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured in a step in which this replica has no tokens, and another one has the most."""
    plans = list[StepPlan]()
    exchanges = Exchanges(replicas=4, bounds=(64, 256))
    limits = Limits(num_slots=4, max_tokens=512, max_model_len=64, block_sizes=(16,), exchanges=exchanges)
    worker: Any = SimpleNamespace(limits=limits, submit=plans.append, collect=lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 + 7 * len(plans))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert cuda._exchange_bytes(worker) == 7
    assert not len(plans[0].slots) and plans[0].sync is not None and plans[0].sync.rows == (256,) * 4


@pytest.mark.parametrize("tokens", [128, 8192])
def test_prompts_behind_fewer_tokens_have_kernels_of_their_own(tokens: int) -> None:
    """An indexer chooses among up to `WHOLE` tokens with other kernels than among more."""
    plan: Any = SimpleNamespace(widened_tokens=(0,), config=SimpleNamespace(cache=CacheConfig()))
    limits = Limits(num_slots=4, max_tokens=tokens, max_model_len=50_000, block_sizes=(64,))
    steps, compiled = cuda._rehearsed(plan, limits, LATENT_CONTEXT, staged=False)
    longest = [step.admitted[0].num_computed + int(step.num_tokens[0]) for step in (*steps, *compiled)]
    assert longest[0] > WHOLE and any(WHOLE // 4 < length <= WHOLE for length in longest)
    assert cuda._rehearsed(plan, limits, 0, staged=False)[1] == []


def test_moved_tokens_have_kernels_for_many_and_for_few_kept_rows() -> None:
    plan: Any = SimpleNamespace(widened_tokens=(0,), config=SimpleNamespace(cache=CacheConfig(enable_cache_blend=True)))
    limits = Limits(num_slots=4, max_tokens=512, max_model_len=50_000, block_sizes=(64,))
    (*_, many), few = cuda._rehearsed(plan, limits, 0, staged=False)
    assert [step.features.blended[0].num_kept for step in (many, *few)] == [255, 7, 15]


@pytest.mark.parametrize(
    ("model", "served", "gib", "tokens"),
    [
        ("qwen3-0.6b", False, 140, 8192),
        ("deepseek-v2-lite", False, 140, 16384),
        ("deepseek-v2-lite", True, 140, 8192),
        ("deepseek-v2-lite", False, 100, 8192),  # of which 58.5 are weights
    ],
)
def test_steps_are_wide_for_experts_when_nobody_waits(model: str, served: bool, gib: int, tokens: int) -> None:
    folder = model_folder(model)
    config = EngineConfig.from_flat(max_num_seqs=4, max_model_len=64)
    machine = Machine(device="cuda", words="", total_memory=gib * GIB)
    plan = resolve_engine(
        config,
        facts_of(folder),
        machine,
        lambda need: "",
        served=served,
    )
    assert plan.config.scheduler.token_budget() == tokens

"""vLLM's names of exchanges between replicas: the dispatchers in their place, notes, and refusals with candidates."""

from pathlib import Path

import pytest

from quire.args.checkpoint import ModelArgs, read_checkpoint_config
from quire.config.engine import EngineConfig, ParallelConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.contracts.scheme import Scheme
from quire.kernels.experts_plan import MoEPlan
from quire.kernels.select import KernelNeeds
from quire.plan.experts import moe_plans
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, inputs_of, met
from quire.plan.parallel_notes import parallel_notes

SPREAD = Parallel(tp=2, dp=4, experts=True)
TOGETHER = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def model(shared: Path) -> ModelArgs:
    return read_checkpoint_config(shared / "hf" / "DeepSeek-V2-Lite")


def plans(model: ModelArgs, backend: str, parallel: Parallel = SPREAD, device: str = "cuda") -> list[MoEPlan]:
    needs = KernelNeeds(device=device, dtype="bfloat16")
    found = moe_plans(model, needs, lambda need: "", parallel=parallel, backend=backend)
    config = EngineConfig(parallel=ParallelConfig(all2all_backend=backend))
    check([one for one in met(Inputs(config=config, parallel=parallel, moe=found)) if "all2all" in one.reason])
    return [found[phase] for phase in ("prefill", "decode") if isinstance(found[phase], MoEPlan)]


@pytest.mark.parametrize(
    ("backend", "dispatcher", "asked"),
    [
        ("auto", "pull", ()),
        ("deepep_high_throughput", "pull", ("prefill",)),
        ("deepep_low_latency", "pull", ("decode",)),
    ],
)
def test_names_of_exchanges_are_taken_by_phase(
    model: ModelArgs, backend: str, dispatcher: str, asked: tuple[str, ...]
) -> None:
    made = plans(model, backend)
    assert [one.dispatcher for one in made] == [dispatcher] * 2
    assert tuple(one.phase for one in made if one.decided.startswith("asked for")) == asked
    assert {one.dispatcher for one in plans(model, backend, Parallel(dp=4))} == {"none"}, "nothing is exchanged"


def test_ranks_of_several_hosts_share_no_memory(model: ModelArgs) -> None:
    needs = KernelNeeds(device="cuda", dtype="bfloat16")
    for parallel, hosts in ((SPREAD, 2), (Parallel(dp=16, experts=True), 1)):
        for eager in (False, True):
            found = moe_plans(model, needs, lambda need: "", parallel=parallel, hosts=hosts, eager=eager)
            assert [one.dispatcher for one in found.values() if isinstance(one, MoEPlan)] == ["all-gather"] * 2


def test_what_cannot_be_is_refused_with_the_candidates(model: ModelArgs) -> None:
    with pytest.raises(ConfigError) as refused:
        plans(model, "nixl_ep", device="cuda")
    words = [
        "--all2all-backend nixl_ep: Quire has no such exchange of tokens: use allgather",
        " or deepep_low_latency, or leave it out. Without it:\nprefill: dispatcher pull, ",
        "  all-gather + triton: fits",
    ]
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_low_latency", "allgather_reducescatter"])
def test_ranks_that_pull_cannot_join_gather(model: ModelArgs, backend: str) -> None:
    """vLLM's launch lines for many ranks, several hosts and CPUs name DeepEP: Quire takes the exchange that fits."""
    assert [one.dispatcher for one in plans(model, backend, device="cpu")] == ["all-gather"] * 2


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("auto", TOGETHER, ""),
        ("allgather_reducescatter", TOGETHER, ""),
        (
            "deepep_low_latency",
            TOGETHER,
            "is taken as Quire's dispatcher pull in decode, where it can join these ranks (up to 8 GPUs of one host), "
            "else Quire chooses; DeepEP itself is not used. For prefill Quire chooses.",
        ),
        ("deepep_high_throughput", TOGETHER, "Quire's dispatcher pull in prefill, where it can"),
        ("nixl_ep", {"data_parallel_size": 2}, "nixl_ep changes nothing: every rank has the tokens of its experts, "),
    ],
)
def test_notes(model: ModelArgs, backend: str, options: dict[str, int], words: str) -> None:
    config = EngineConfig(parallel=ParallelConfig(all2all_backend=backend, **options))
    notes = (*parallel_notes(model, config.parallel), *(one.said for one in met(inputs_of(config, model))))
    assert len(notes) == bool(words) and all(words in note for note in notes)


def test_the_8_bit_kernel_runs_experts_of_odd_sizes(shared: Path) -> None:
    """It reads sizes in parts of 128, and pads 768 / 4 = 192 of an expert on each of four ranks."""
    model = read_checkpoint_config(shared / "hf" / "Qwen3-30B-A3B")
    scheme = Scheme(values="e4m3", block=(1, 0), inputs="token")
    needs = KernelNeeds(device="cuda", dtype="bfloat16", scheme=scheme)
    for parallel in (Parallel(), Parallel(tp=4), Parallel(tp=4, experts=True)):
        found = moe_plans(model, needs, lambda need: "", parallel=parallel)
        assert all(isinstance(one, MoEPlan) and one.experts == "scaled" for one in found.values()), found


@pytest.mark.parametrize(
    ("values", "group", "kernel"),
    [("w4", 128, "weight_only"), ("w4", 0, "weight_only"), ("w8", 32, "weight_only"), ("w4", 16, "ref")],
)
def test_experts_of_integer_weights_have_a_kernel_for_wide_groups(
    shared: Path, values: str, group: int, kernel: str
) -> None:
    model = read_checkpoint_config(shared / "hf" / "Qwen3-30B-A3B")
    needs = KernelNeeds(device="cuda", dtype="bfloat16", scheme=Scheme(values=values, block=(1, group)))
    found = moe_plans(model, needs, lambda need: "")
    assert all(isinstance(one, MoEPlan) and one.experts == kernel for one in found.values()), found

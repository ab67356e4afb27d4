"""The plan of the expert layers: a pure function, with a reason for every candidate that is not used."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.args.checkpoint import ModelArgs, read_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.contracts.scheme import Scheme
from quire.kernels.experts_plan import DISPATCHERS, KERNELS, MoEPlan
from quire.kernels.supports import SUPPORTS
from quire.plan import dispatchers as module
from quire.plan.dispatchers import Hardware, resolve_moe

from ...support.changed_args import with_experts

GPU = Hardware(
    device="cuda", kernels=(("triton", ""), ("grouped", ""), ("cpu", "runs on cpu, not on cuda"), ("ref", ""))
)
CPU = Hardware(device="cpu", kernels=(("triton", "runs on cuda, not on cpu"), ("cpu", ""), ("ref", "")))
ROOT = Path(__file__).parents[3]
LINE = module._chosen.__code__.co_firstlineno
SPREAD = Parallel(tp=2, dp=4, experts=True)


@pytest.fixture(scope="module")
def model(shared: Path) -> ModelArgs:
    """With shared experts."""
    return read_checkpoint_config(shared / "hf" / "DeepSeek-V2-Lite")


def plan(
    model: ModelArgs,
    topology: Parallel | None = None,
    hardware: Hardware = GPU,
    phase: str = "decode",
    scheme: Scheme | None = None,
    **asked: str,
) -> MoEPlan:
    return resolve_moe(model, scheme, topology or Parallel(), hardware, phase, asked)


def test_the_table_knows_every_kernel() -> None:
    assert set(KERNELS) == set(SUPPORTS["experts"])


def test_one_rank(model: ModelArgs) -> None:
    made = plan(model)
    assert (made.dispatcher, made.experts, made.quantize_at) == ("none", "triton", "nowhere")
    assert (made.partial_over, made.shared) == ((), "added")
    assert made.capturable
    assert str(made).splitlines() == [
        "decode: dispatcher none, experts triton; quantized nowhere, result whole, shared experts added, capturable; "
        f"first that fits, decided in plan/dispatchers.py:{LINE}",
        "  none + triton: fits",
        "  none + grouped: fits",
        "  none + cpu: runs on cpu, not on cuda",
        "  none + ref: fits",
        "  pull + any: every rank already has the tokens that its experts need",
        "  all-gather + any: every rank already has the tokens that its experts need",
    ]
    assert model.moe is not None
    assert plan(with_experts(model, shared_size=0)).shared == "none"


@pytest.mark.parametrize(
    ("topology", "partial"),
    [
        (Parallel(tp=8), ("tp",)),
        (Parallel(tp=8, experts=True), ("tp",)),
        (Parallel(dp=8), ()),
        (Parallel(tp=2, dp=2, pp=2), ("tp",)),
    ],
)
def test_ranks_that_have_all_their_tokens_leave_sums(
    model: ModelArgs, topology: Parallel, partial: tuple[str, ...]
) -> None:
    made = plan(model, topology)
    assert made.dispatcher == "none" and made.partial_over == partial and made.shared == "added"
    assert ("partial, to be summed over tp" in str(made)) == bool(partial)


def test_a_cpu_captures_nothing_and_needs_to_capture_nothing(model: ModelArgs) -> None:
    made = plan(model, hardware=CPU)
    assert made.experts == "cpu" and not made.capturable
    odd = Hardware(device="cuda", kernels=(("cpu", ""), ("ref", "")))
    assert plan(model, hardware=odd).candidates[0] == (
        "none",
        "cpu",
        "cpu cannot be captured in a CUDA graph (--enforce-eager captures none)",
    )
    assert plan(model, hardware=odd, phase="prefill").experts == "cpu"


def test_what_is_asked_for_is_taken_or_refused(model: ModelArgs) -> None:
    made = plan(model, experts="grouped", dispatcher="none")
    assert made.experts == "grouped" and made.candidates[0] == ("none", "triton", "grouped was asked for")
    for asked, words in (
        ({"experts": "cpu"}, ["none + cpu: runs on cpu", "none + ref: cpu was asked for", "experts=cpu"]),
        ({"dispatcher": "pull"}, ["none + triton: pull was asked for", "pull + any: every rank"]),
        ({"dispatcher": "telepathy"}, ["'telepathy' does not exist (one of none, pull, all-gather)"]),
        ({"experts": "magic"}, ["'magic' does not exist (one of hopper, triton, scaled,"]),
    ):
        with pytest.raises(ConfigError) as refused:
            plan(model, **asked)
        assert all(word in str(refused.value) for word in words), refused.value


def test_gpus_of_a_host_pull(model: ModelArgs) -> None:
    for phase in ("prefill", "decode"):
        made = plan(model, SPREAD, phase=phase)
        assert (made.dispatcher, made.experts, made.partial_over) == ("pull", "triton", ())
        assert made.shared == "summed alone"
    assert made.decided == f"first that fits, decided in plan/dispatchers.py:{LINE}"
    for line in (
        "  none + any: tokens of other replicas need the experts of this rank",
        "  pull + triton: fits",
        "  all-gather + triton: fits",
        "  pull + cpu: runs on cpu, not on cuda",
    ):
        assert line in str(made)
    assert plan(model, SPREAD, CPU).dispatcher == "all-gather"


def test_ranks_of_several_hosts_read_no_memory_of_each_other(model: ModelArgs) -> None:
    wide, one = Parallel(dp=32, experts=True), replace(GPU, kernels=GPU.kernels[:1])
    for topology, hosts, why in (
        (wide, 1, "pull joins at most 8 ranks, those of one host"),
        (SPREAD, 2, "pull reads the memory of other ranks, and these are on 2 hosts"),
    ):
        for eager in (False, True):
            made = plan(model, topology, replace(one, eager=eager, hosts=hosts))
            assert made.dispatcher == "all-gather" and made.capturable and f"\n  pull + any: {why}\n" in str(made)


def test_the_line_that_decides_is_that_of_the_function() -> None:
    assert (ROOT / "src/quire/plan/dispatchers.py").read_text().splitlines()[LINE - 1].startswith("def _chosen(")


def test_a_dispatcher_that_sums_over_tp_leaves_shared_experts_to_be_summed_alone(
    model: ModelArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(model, SPREAD)
    assert (made.dispatcher, made.experts, made.partial_over, made.shared) == ("pull", "triton", (), "summed alone")
    assert plan(model, Parallel(dp=4, experts=True)).shared == "added"
    monkeypatch.setattr(module, "DISPATCHERS", {"all-gather": DISPATCHERS["all-gather"]})
    assert plan(model, SPREAD, phase="prefill").dispatcher == "all-gather"


def test_activations_are_quantized_by_the_experts_where_the_weights_ask_for_it(model: ModelArgs) -> None:
    places = {
        values: plan(model, scheme=Scheme(values=values, block=(1, 0), inputs=inputs)).quantize_at
        for values, inputs in (("e4m3", "token"), ("int8", "tensor"), ("w4", ""))
    }
    assert places == {"e4m3": "experts", "int8": "experts", "w4": "nowhere"}

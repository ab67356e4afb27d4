"""The form of rows on the way to experts: in 8 bits only where the experts would make the same bits."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from quire.args.checkpoint import ModelArgs, read_checkpoint_config
from quire.assemble.rank_child import exchange_layout
from quire.config.engine import EngineConfig
from quire.contracts.parallel import Parallel
from quire.contracts.scheme import AS_THEY_ARE, Scheme, Wire, WirePlan
from quire.kernels.experts_plan import MoEPlan
from quire.plan import expert_rows as module
from quire.plan.collectives import exchange_bytes
from quire.plan.dispatchers import Hardware, resolve_moe
from quire.plan.engine import EnginePlan
from quire.plan.expert_rows import with_wire

from ...support.explained import explained

BLOCK = Scheme(values="e4m3", block=(128, 128), inputs="group")
POWERS = Scheme(values="e4m3", block=(128, 128), inputs="group", ue8m0=True)
CHANNEL = Scheme(values="e4m3", block=(1, 0), inputs="token")
INT8 = Scheme(values="int8", block=(1, 0), inputs="token")
STATIC = Scheme(values="int8", block=(1, 0), inputs="tensor")
INTEGERS = Scheme(values="w4", block=(1, 32))
LINE = module.choose_wire.__code__.co_firstlineno


@pytest.fixture(scope="module")
def model(shared: Path) -> ModelArgs:
    return read_checkpoint_config(shared / "hf" / "Qwen3-30B-A3B")


def plan(
    model: ModelArgs, phase: str = "decode", parallel: Parallel | None = None, dispatcher: str = "pull"
) -> MoEPlan:
    hardware = Hardware(
        device="cuda", kernels=(("scaled", ""),), eager=True, features={"scaled": ("join", "quantized rows")}
    )
    parallel = parallel or Parallel(dp=8, experts=True)
    return resolve_moe(model, BLOCK, parallel, hardware, phase, {"dispatcher": dispatcher})


@pytest.mark.parametrize(
    ("scheme", "form", "size"),
    [
        (BLOCK, Wire("e4m3", 128), 2048 + 64),
        (POWERS, Wire("e4m3", 128, True), 2048 + 64),
        (CHANNEL, Wire("e4m3"), 2048 + 4),
        (INT8, Wire("int8"), 2048 + 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dispatcher", ["pull", "all-gather"])
def test_rules_of_a_row(model: ModelArgs, scheme: Scheme, form: Wire, size: int, phase: str, dispatcher: str) -> None:
    made = with_wire(plan(model, phase, dispatcher=dispatcher), {scheme}, 2048, 2)
    assert isinstance(made, MoEPlan)
    why = f"as the experts quantize them, so results stay; {size} bytes per row, not 4096"
    assert made.wire == WirePlan(form, f"{why}, decided in plan/expert_rows.py:{LINE}")
    before = plan(model, phase, dispatcher=dispatcher)
    assert made.quantize_at == "wire" and replace(made, wire=before.wire, quantize_at=before.quantize_at) == before


@pytest.mark.parametrize(
    ("schemes", "columns", "why"),
    [
        ((None,), 2048, "the experts do not quantize rows"),
        ((INTEGERS,), 2048, "the experts do not quantize rows"),
        ((STATIC,), 2048, "each expert has a scale of its own for its rows"),
        ((BLOCK, None), 2048, "layers quantize the rows of experts in different ways"),
        ((BLOCK, CHANNEL), 2048, "layers quantize the rows of experts in different ways"),
        ((BLOCK,), 2880, "rows of 2880 columns do not divide into parts of 128"),
        ((INT8,), 2888, "rows of 2888 columns do not divide into parts of 16"),
    ],
    ids=str,
)
def test_reasons_for_rows_as_they_are(model: ModelArgs, schemes: tuple[Scheme | None], columns: int, why: str) -> None:
    made = with_wire(plan(model), set(schemes), columns, 2)
    assert isinstance(made, MoEPlan)
    assert made.wire == WirePlan(AS_THEY_ARE, f"{why}, decided in plan/expert_rows.py:{LINE}")
    assert made.quantize_at == "experts"


def test_a_kernel_that_takes_no_such_rows(model: ModelArgs) -> None:
    made = with_wire(replace(plan(model), features=("join",)), {BLOCK}, 2048, 2)
    assert isinstance(made, MoEPlan) and made.wire.decided.startswith("kernel scaled takes no quantized rows, decided")


def test_nothing_is_sent_without_replicas(model: ModelArgs) -> None:
    alone = plan(model, parallel=Parallel(tp=2, experts=True), dispatcher="none")
    assert with_wire(alone, {BLOCK}, 2048, 2) is alone and alone.wire == WirePlan()
    assert with_wire("no kernel", {BLOCK}, 2048, 2) == "no kernel"


@pytest.mark.parametrize(("name", "form"), [("DeepSeek-V3", Wire("e4m3", 128)), ("Qwen3-30B-A3B", AS_THEY_ARE)])
def test_the_memory_of_gpus_has_the_form_of_the_plan(shared: Path, name: str, form: Wire) -> None:
    config = EngineConfig.from_flat(model=str(shared / "hf" / name), max_num_batched_tokens=1000)
    parallel = Parallel(dp=8, experts=True)
    made = explained(config, parallel, "h200").plan
    layout = exchange_layout(made)
    assert made.wire == layout.wire == form
    told = exchange_bytes(made.args, parallel, item_bytes=2, tokens=1000, wire=form)
    assert 0 <= layout.num_bytes - told < 1024, "counts, and parts that begin with whole 16 bytes"
    again = msgspec.json.decode(msgspec.json.encode(made), type=EnginePlan)
    assert again.wire == form and again.moe == made.moe, "ranks get the plan as text"

"""A plan is a value: made without PyTorch, serialized, read back, and what is built is what it says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.assemble.build import build_model
from quire.contracts.errors import ConfigError, UnsupportedModel
from quire.contracts.parallel import Parallel
from quire.kernels.attention import AttentionMeta, KVView
from quire.layers.context import StepContext
from quire.layers.stack import run_layers
from quire.plan.engine import EnginePlan
from quire.plan.meeting_rows.records import IDLE, MISSING
from quire.plan.meetings import Meeting, check
from quire.reports.holdings import Holdings
from quire.weights.dummy import load_dummy

from ...support.filled_models import planned
from ...support.tiny_models import FAMILIES, Tiny, tiny_config

NO_TORCH = """
import json, os, sys
sys.modules["torch"] = None  # importing it is an error
import msgspec
from quire.config.engine import EngineConfig
from quire.contracts.errors import UserError
from quire.explain.describe import plan_engine
from quire.plan.engine import EnginePlan

planned, refused = [], {}
full = os.environ.get("QUIRE_FULL") == "1"
machines = ("cpu", {}), ("h200", {}), ("h200", dict(tensor_parallel_size=2, pipeline_parallel_size=2))
for number, folder in enumerate(sys.argv[1:]):
    for device, sizes in machines if full else machines[number % 3 :][:1]:
        try:
            plan = plan_engine(EngineConfig.from_flat(model=folder, **sizes), device).plan
        except UserError as error:
            refused.setdefault(folder, str(error))
            continue
        for codec in (msgspec.json, msgspec.msgpack) if device == "cpu" else (msgspec.msgpack,):
            again = codec.decode(codec.encode(plan), type=EnginePlan)
            assert again == plan, (folder, device)
        planned.append(folder)
print(json.dumps([sorted(set(planned)), refused]))
"""


@pytest.mark.parametrize("part", range(4))
def test_plans_of_real_models_without_torch(part: int, shared: Path) -> None:
    """Every configuration whose architecture is known is planned, quantized or not, and read back equal.

    For a CPU, a GPU or four GPUs in turn; with --full for all.
    """
    folders = sorted(str(path.parent) for path in (shared / "hf").glob("*/config.json"))[part::4]
    run = subprocess.run([sys.executable, "-c", NO_TORCH, *folders], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    made, refused = json.loads(run.stdout)
    assert len(folders) - len(made) == len(refused) <= 3 and len(made) >= 4
    assert all("model_type" in why or "architecture" in why for why in refused.values()), refused


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_that_was_read_back_builds_the_same_model(family: str) -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family=family)))
    plan = planned(args)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=EnginePlan)
    assert again == plan
    outputs = []
    for one in (plan, again):
        model = build_model(one)
        load_dummy(model, 3)
        outputs.append(model.head(model.norm(model.embed(torch.arange(4)))))
    assert torch.equal(*outputs)


def test_what_cannot_run_is_planned_all_the_same_and_refused_by_its_value() -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))
    check(planned(args).meetings)
    rows = (Meeting("wings", "wings are not implemented yet", "walk", MISSING), Meeting("", "a hat is idle", "", IDLE))
    other = msgspec.structs.replace(planned(args), meetings=rows)
    assert other.missing == rows[:1]
    with pytest.raises(UnsupportedModel, match="^wings are not implemented yet: walk.$"):
        check(other.meetings)


@torch.inference_mode()
def test_another_kernel_in_a_plan_is_another_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))
    from quire.kernels.attention import ref

    called: list[str] = []
    real = ref.paged_attention
    monkeypatch.setattr(ref, "paged_attention", lambda *given: called.append("ref") or real(*given))
    for forced in ({}, {"attention": "ref"}):
        plan = planned(args, forced=forced)
        model = build_model(plan)
        load_dummy(model)
        kv = [
            KVView(*torch.zeros(2, 2, args.mixers[0].num_kv_heads, 8, args.mixers[0].head_dim))
            for _ in range(args.num_layers)
        ]
        meta = AttentionMeta(
            torch.tensor([0, 4], dtype=torch.int32),
            torch.tensor([4], dtype=torch.int32),
            torch.tensor([[1]], dtype=torch.int32),
            torch.arange(8, 12),
        )
        run_layers(model, model.embed(torch.arange(4)), StepContext(torch.arange(4), (meta,), kv))
        assert len(called) == args.num_layers * len(forced)


@pytest.mark.parametrize("kernel", ["cpu", "ref"])
def test_the_plan_of_experts_names_their_kernel_and_nothing_else_does(kernel: str) -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe")))
    plan = planned(args, forced={"experts": kernel})
    assert plan.experts is not None and plan.experts.experts == kernel
    assert all(one.op != "experts" for one in plan.kernels)
    other = planned(args)
    for one in (plan, msgspec.structs.replace(other, moe=plan.moe)):
        layer: Any = build_model(one).layers[-1]
        assert layer.mlp.experts.kernel.__name__ == f"quire.kernels.experts.{kernel}"
    with pytest.raises(ConfigError, match="'magic' does not exist"):
        planned(args, forced={"experts": "magic"})
    with pytest.raises(ConfigError, match="no way to run the experts"):
        planned(args, forced={"experts": "triton"})


def test_another_shape_in_a_plan_is_another_layer() -> None:
    """Half the width of a feed-forward layer: its two projections follow the parameters, not the configuration."""
    args = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))
    plan, width = planned(args), args.layers[0].feed_forward.width // 2
    half = {param.name: param for param in planned(args, parallel=Parallel(tp=2)).params if ".mlp." in param.name}
    narrow = msgspec.structs.replace(plan, params=tuple(half.get(param.name, param) for param in plan.params))
    mlp = build_model(narrow).layers[0].mlp
    assert mlp.gate_up.out_features == 2 * width and mlp.down.in_features == width


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_matrices_keep_their_stored_type_where_kernels_read_it(kind: str) -> None:
    """Norms and biases have the type of the arithmetic."""
    args = parse_checkpoint_config(tiny_config(Tiny(family=kind)))
    plan = planned(args, weights="bfloat16", probe=lambda need: "")
    types = {param.name: param.dtype for param in plan.params}
    matrices = {param.name for param in plan.params if len(param.shape) == 2 and "head_norm" not in param.name}
    assert {name for name, dtype in types.items() if dtype == "bfloat16"} == matrices and plan.dtype.weights
    whole = planned(args, probe=lambda need: "")
    assert not any(param.dtype == "bfloat16" for param in whole.params)
    assert 0.45 * whole.weight_bytes < plan.weight_bytes < 0.6 * whole.weight_bytes
    assert Holdings(plan=plan).held[0][1] == plan.weight_bytes


def test_without_native_kernels_weights_are_converted_and_the_reason_is_told() -> None:
    lacking = {"native": "there is no C compiler"}
    args = parse_checkpoint_config(tiny_config(Tiny()))
    plan = planned(args, weights="bfloat16", probe=lambda need: lacking.get(need, ""))
    assert not plan.dtype.weights and plan.dtype.reason == "weights are converted, because there is no C compiler"
    assert not any(param.dtype == "bfloat16" for param in plan.params)

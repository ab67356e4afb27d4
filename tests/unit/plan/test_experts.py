"""Kernels of experts where layers differ in the kind of their weights: each kind has its own, by every ignore list."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.args.checkpoint import parse_checkpoint_config, read_checkpoint_config
from quire.assemble.build import build_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.scheme import UNQUANTIZED, Scheme
from quire.entry.cli.main import main
from quire.kernels.experts_plan import MoEPlan
from quire.kernels.select import KernelNeeds, probe_of
from quire.kernels.supports import SUPPORTS
from quire.plan.dtype import DTypePlan
from quire.plan.engine import EnginePlan, Machine, ModelFacts, resolve_engine
from quire.plan.experts import moe_plans
from quire.quantization.read import find_quantization
from quire.weights.load import load_weights

from ...support.changed_args import with_experts
from ...support.filled_models import planned
from ...support.partly_quantized import MIXES, leaving, write_partly
from ...support.quantized_checkpoints import FORMS, Form
from ...support.thinned import thinned
from ...support.tiny_models import EXPERTS, Tiny, tiny_config
from ..models.test_against_transformers import run_paged, write_checkpoint
from ..quantization.test_logits import PROMPT, theirs

STACKED = ("gpt_oss", "gemma4_moe", "granite_moe")  # families whose experts lie in one tensor: only MXFP4 quantizes it
UNGATED = ("nemotron_moe",)  # families whose experts have no gate: no kernel of a GPU runs them
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "moe_intermediate_size": 128, "intermediate_size": 128}
GROUPS = {  # sizes of some families that groups of 32 divide
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "kv_lora_rank": 64,
    "v_head_dim": 16,
    "intermediate_size_mlp": 128,
    "moe_layers": [1, 2],
    "linear_head_dim": 32,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]},
}
BLOCKS = dict.fromkeys(("mixtral", "minimax_m2", "kimi_linear"), "block_sparse_moe") | dict.fromkeys(
    ("llama4_text", "lfm2_moe"), "feed_forward"
)
HOPPER = probe_of((9, 0))
W4, BLOCK = Scheme(values="w4", block=(1, 32)), Scheme(values="e4m3", block=(128, 128), inputs="group")


def config_of(family: str, form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of a model whose layers 1 and 2 have experts, and its quantization."""
    raw = tiny_config(Tiny(family=family), **SIZES, **GROUPS)
    if "q_lora_rank" in raw and raw["q_lora_rank"]:
        raw["q_lora_rank"] = 64
    raw |= {"quantization_config": form.config}
    return raw, find_quantization(Path("nowhere"), raw).config


def on_gpu(family: str, form: Form, parallel: Parallel = ALONE, number: int = 0) -> EnginePlan:
    raw, quantization = config_of(family, form)
    machine = Machine(device="cuda", words="a GPU", total_memory=1 << 37)
    return resolve_engine(
        EngineConfig(),
        ModelFacts(
            folder=Path("nowhere"),
            args=parse_checkpoint_config(raw),
            dtype=DTypePlan(dtype="bfloat16", reason="as asked"),
            quantization=quantization,
        ),
        machine,
        HOPPER,
        parallel=parallel,
        number=number,
    )


def kernels_of(plan: EnginePlan) -> dict[int, str]:
    """Layer -> kernel of its experts, the same in both phases."""
    found = [
        {
            int(param.name.split(".")[1]): one.of(param.scheme).experts
            for param in plan.params
            if param.name.endswith(".experts.gate_up")
        }
        for one in plan.moe.values()
        if isinstance(one, MoEPlan)
    ]
    assert len(found) == 2 and found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("form", "family"), thinned(FORMS, [family for family in EXPERTS if family not in (*STACKED, *UNGATED)])
)
def test_a_gpu_has_a_kernel_for_each_kind_of_experts(form: str, family: str) -> None:
    """A third of all pairs: what is chosen depends on the form, and a family gives the names of its layers."""
    own = {"ct-mxfp4": "weight_only_hopper"}.get(form, "weight_only")
    kernel = "scaled" if FORMS[form].inputs else own
    for left in MIXES.values():
        kernels = kernels_of(on_gpu(family, leaving(form, left, BLOCKS.get(family, "mlp"))))
        assert {1, 2} <= set(kernels) and len(set(kernels.values())) == 2
        assert kernels == {layer: "hopper" if layer in left else kernel for layer in kernels}


def test_ranks_of_all_stages_plan_the_same_kinds() -> None:
    """The first stage has dense layers and unquantized experts alone."""
    form = leaving("fp8-block", (1,))
    plans = [on_gpu("glm4_moe", form, Parallel(pp=2), number) for number in (0, 1)]
    assert plans[0].moe == plans[1].moe
    assert [set(kernels_of(plan).values()) for plan in plans] == [{"hopper"}, {"scaled"}]
    assert plans[0].experts is not None and plans[0].experts.kernels == "hopper and scaled"


def test_replicas_exchange_rows_as_they_are_where_layers_quantize_them_in_different_ways() -> None:
    plan = on_gpu("glm4_moe", leaving("fp8-block", (1,)), Parallel(dp=2, experts=True))
    assert plan.experts is not None and plan.wire.values == "" and plan.spread == {"prefill": "pull", "decode": "pull"}
    assert [one.wire for one in plan.experts.others] == [plan.experts.wire]
    assert [one.quantize_at for one in (plan.experts, *plan.experts.others)] == ["nowhere", "experts"]


def test_a_forced_kernel_runs_the_kinds_that_it_can_run() -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="glm4_moe"), **SIZES))
    kinds = [KernelNeeds(device="cuda", dtype="bfloat16", scheme=scheme) for scheme in (None, W4, BLOCK)]

    def chosen(name: str) -> list[str]:
        plan = moe_plans(args, kinds, HOPPER, forced=name)["decode"]
        assert isinstance(plan, MoEPlan)
        return [plan.of(one.scheme).experts for one in kinds]

    assert chosen("triton") == ["triton", "weight_only", "scaled"]
    assert chosen("ref") == ["ref", "ref", "ref"]
    with pytest.raises(ConfigError, match="experts='magic' does not exist"):
        chosen("magic")
    odd = replace(kinds[1], scheme=Scheme(values="w4", block=(1, 24)))
    plan = moe_plans(args, [*kinds, odd], HOPPER)["prefill"]
    assert isinstance(plan, MoEPlan)
    assert (plan.of(W4).experts, plan.of(odd.scheme).experts) == ("weight_only", "ref")


def test_explain_names_the_kernel_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, _ = config_of("glm4_moe", leaving("fp8-block", (1,)))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["explain", str(tmp_path), "--device", "h200", "--dtype", "bfloat16", "--load-format", "dummy"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "experts of unquantized weights in prefill and decode: dispatcher none" in shown
    assert "experts of fp8 block weights in prefill and decode: dispatcher none" in shown
    assert "experts.hopper.run" in shown and "experts.scaled.put -> experts.scaled.run" in shown


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("form", ["awq", "gptq-zeros", "ct-w4-group", "ct-int8-weights"])
def test_logits_of_two_kernels(form: str, mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with two kernels, too, as those with units for bfloat16 have: against transformers in float32."""
    panels = SUPPORTS["experts"]["panels"]
    monkeypatch.setitem(
        SUPPORTS["experts"],
        "panels",
        replace(panels, features=panels.features - {UNQUANTIZED}),  # type: ignore[index]
    )
    write_checkpoint(tmp_path / "plain", "qwen3_moe", SIZES | {"mlp_only_layers": [0], "head_dim": 32})
    means = write_partly(tmp_path / "plain", tmp_path / "quantized", form, MIXES[mix])
    for path in (tmp_path / "plain").glob("*.safetensors*"):
        path.unlink()
    save_file(means, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    expected, _ = theirs(tmp_path / "plain", FORMS[form])
    args = read_checkpoint_config(tmp_path / "quantized")
    raw = json.loads((tmp_path / "quantized" / "config.json").read_text())
    plan = planned(args, quantization=find_quantization(tmp_path / "quantized", raw).config)
    kernels = kernels_of(plan)
    assert {layer for layer, kernel in kernels.items() if kernel == "cpu"} == set(MIXES[mix])
    assert len(set(kernels.values())) == 2
    model = build_model(plan)
    load_weights(model, tmp_path / "quantized")
    (actual,) = run_paged(model, [PROMPT], [[7, 1, 5]])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


EXPERT_FORMS = [
    {"act": "gelu_tanh"},
    {"act": "gelu"},
    {"act": "swiglu_oai"},
    {"biased": True},
    {"act": "swiglu_oai", "biased": True},
]


@pytest.mark.parametrize("form", EXPERT_FORMS, ids=str)
def test_kernels_of_experts_have_what_their_form_needs(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lacks it is left out with the reason; biased experts are packed, not loaded in place."""
    args = with_experts(parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe"))), **form)
    words = {*([form["act"]] if "act" in form else []), *(["bias"] if "biased" in form else [])}
    needs = KernelNeeds(device="cuda", dtype="bfloat16")
    plan = moe_plans(args, needs, HOPPER)["decode"]
    assert isinstance(plan, MoEPlan) and plan.experts == "hopper" and words <= set(plan.features)
    assert ("in place" in plan.features) == ("biased" not in form)
    lacking = replace(SUPPORTS["experts"]["hopper"], features=SUPPORTS["experts"]["hopper"].features - words)
    monkeypatch.setitem(SUPPORTS, "experts", {**SUPPORTS["experts"], "hopper": lacking})
    plan = moe_plans(args, needs, HOPPER)["decode"]
    assert isinstance(plan, MoEPlan) and plan.experts == "triton"
    assert (plan.candidates[0][1], plan.candidates[0][2]) == ("hopper", f"has no {', '.join(sorted(words))}")
    monkeypatch.setitem(SUPPORTS, "experts", {"hopper": lacking})
    answer = moe_plans(args, needs, HOPPER)["decode"]
    assert isinstance(answer, str) and f"hopper: has no {', '.join(sorted(words))}" in answer

"""Columns in activation order under tensor parallelism: slices of them are dequantized, the rest stays quantized."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.parallel import Parallel
from quire.entry.cli.main import main
from quire.plan.engine import EnginePlan, plan_notes
from quire.quantization.read import find_quantization

from ...support.filled_models import planned
from ...support.quantized_checkpoints import FORMS
from ...support.tiny_models import Tiny, tiny_config

ORDERED = ("gptq-order", "gptq-8-v2-order", "ct-w4-order")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def notes_of(plan: EnginePlan) -> tuple[str, ...]:
    return plan_notes(plan, plan.params)


def config_of(form: str, family: str = "qwen3") -> dict[str, Any]:
    return tiny_config(Tiny(family=family), **SIZES) | {"quantization_config": FORMS[form].config}


def plan_of(raw: dict[str, Any], weights: str = "", **sizes: int) -> EnginePlan:
    found = find_quantization(Path("nowhere"), raw).config
    return planned(parse_checkpoint_config(raw), quantization=found, parallel=Parallel(**sizes), weights=weights)


@pytest.mark.parametrize("form", ORDERED)
def test_slices_of_columns_are_dequantized_and_a_note_says_so(form: str) -> None:
    """Their numbers are those of the computation, not of unquantized weights that stay as they are stored."""
    plan = plan_of(config_of(form), "bfloat16", tp=2)
    plain = {one.name.split(".", 2)[2]: one.dtype for one in plan.params if one.stored and one.scheme is None}
    assert plain == {"attention.output.weight": "", "mlp.down.weight": ""}
    (note,) = notes_of(plan)
    assert note.startswith("o_proj and down_proj: kept in float32, because") and "desc_act=false" in note
    assert not notes_of(plan_of(config_of(form))) and all(
        one.scheme for one in plan_of(config_of(form)).params if one.stored
    )


def test_both_matrices_of_sliced_experts_are_dequantized_and_whole_ones_stay() -> None:
    raw = config_of("ct-w4-order", "glm4_moe")
    sliced, whole = plan_of(raw, tp=2), plan_of(raw, tp=2, experts=True)
    for plan, quantized in ((sliced, False), (whole, True)):
        found = {one.name: one.scheme for one in plan.params if one.shard == "experts"}
        assert found and all((scheme is not None) == quantized for scheme in found.values())
    assert "with all matrices of these experts" in notes_of(sliced)[0] and "experts" not in notes_of(whole)[0]


def test_explain_prints_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("gptq-order")))
    for name in ("gptq_marlin", "slimquant_marlin"):
        assert (
            main(["explain", str(tmp_path), "--device", "h200", "-tp", "2", "-q", name, "--load-format", "dummy"]) == 0
        )
        shown = " ".join(capsys.readouterr().out.split())
        assert "note: o_proj and down_proj: kept in" in shown
        assert f"note: --quantization {name}: the weights are gptq. Quire chooses kernels by itself" in shown

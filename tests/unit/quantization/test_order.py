"""Columns in activation order under tensor parallelism: slices of them are dequantized, the rest stays quantized."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.contracts.scheme import Scheme
from quire.entry.cli.main import main
from quire.plan.engine import EnginePlan
from quire.plan.layout import layout
from quire.plan.parallel_notes import slice_notes
from quire.quantization.assigned import settled
from quire.quantization.read import find_quantization

from ...support.filled_models import planned
from ...support.quantized_checkpoints import FORMS
from ...support.tiny_models import Tiny, tiny_config

ORDERED = ("gptq-order", "gptq-8-v2-order", "ct-w4-order")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def notes_of(plan: EnginePlan) -> tuple[str, ...]:
    return slice_notes(plan.params, plan.dtype.dtype)


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


def test_cut_groups_become_smaller_and_a_note_says_so() -> None:
    """Slices of 72 columns cut groups of 32 into groups of 8; those of 36 have parts that no kernel runs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    raw = config_of("gptq") | heads | {"intermediate_size": 288}
    (note,) = notes_of(plan_of(raw, tp=4))
    assert note.startswith("down_proj: ranks of -tp cut groups of 32 columns, which are read as groups of 8:")
    assert not notes_of(plan_of(raw, tp=1)) and not notes_of(plan_of(config_of("gptq"), tp=2))
    with pytest.raises(ConfigError, match=r"down_proj\.weight .* no multiple of 8: use -tp 1, 2 or 4\."):
        plan_of(raw, tp=8)


def test_experts_whose_groups_would_be_too_small_are_refused_with_the_sizes_that_work() -> None:
    raw = config_of("ct-w4-group", "glm4_moe") | {"moe_intermediate_size": 192, "num_attention_heads": 4}
    assert not notes_of(plan_of(raw, tp=2))
    with pytest.raises(ConfigError, match=r"into groups of 16; kernels .*: use -tp 1 or 2, or whole experts for each"):
        plan_of(raw, tp=4)


def test_explain_prints_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("gptq-order")))
    for name in ("gptq_marlin", "slimquant_marlin"):
        assert (
            main(["explain", str(tmp_path), "--device", "h200", "-tp", "2", "-q", name, "--load-format", "dummy"]) == 0
        )
        shown = " ".join(capsys.readouterr().out.split())
        assert "note: o_proj and down_proj: kept in" in shown
        assert f"note: --quantization {name}: the weights are gptq. Quire chooses kernels by itself" in shown


def test_experts_of_several_widths_are_kept_in_one_that_holds_their_numbers() -> None:
    """Each rank packs the experts of a layer alike, whichever it has: experts move between ranks."""
    raw = config_of("gptq-dynamic", "glm4_moe")
    args = parse_checkpoint_config(raw)
    config = settled(find_quantization(Path("nowhere"), raw).config, layout(args), {})
    for number in range(2):
        plan = planned(args, quantization=config, parallel=Parallel(tp=2, experts=True), number=number)
        (scheme,) = {one.scheme for one in plan.params if one.each}
        assert scheme == Scheme(values="w8", block=(1, 16), zeros=True)
        (note,) = notes_of(plan)
        assert "are stored in several forms" in note and "8-bit in groups of 16, zero points" in note

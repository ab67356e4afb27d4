"""The layout of a model is that of the layers that are built, and of the checkpoint."""

import json
from math import prod
from pathlib import Path

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import UnsupportedModel
from quire.models import qwen3
from quire.plan.layout import checkpoint_names, layout, parameters_per_token, stored_names

from ...support.tiny_models import Tiny, tiny_config

# billions of parameters: in all, as the model cards say; in the experts, layers x experts x 3 x width x hidden
SIZES = {
    "DeepSeek-V3": (671.0, 653.9),
    "Qwen3-30B-A3B": (30.5, 29.0),
    "Mixtral-8x7B-v0.1": (46.7, 45.1),
    "GLM-4.5": (352.8, 336.0),
    "DeepSeek-V2-Lite": (15.7, 14.4),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_real_models(shared: Path, name: str) -> None:
    raw = json.loads((shared / "hf" / name / "config.json").read_text())
    args = parse_checkpoint_config(raw)
    params = layout(args)
    experts = sum(prod(param.shape) for param in params if param.shard == "experts")
    assert round(sum(prod(param.shape) for param in params) / 1e9, 1) == SIZES[name][0]
    assert round(experts / 1e9, 1) == SIZES[name][1]
    names = list(stored_names(params))
    assert len(set(names)) == len(names)
    assert all(sum(part.rows for part in param.parts) == param.shape[0] for param in params)


def test_owned_experts_are_a_part_of_all(shared: Path) -> None:
    args = parse_checkpoint_config(json.loads((shared / "hf" / "Qwen3-30B-A3B" / "config.json").read_text()))
    everything = set(stored_names(layout(args)))
    ranks = [set(stored_names(layout(args, experts=range(rank, 128, 8)))) for rank in range(8)]
    assert set().union(*ranks) == everything
    shared_by_all = set.intersection(*ranks)
    assert not any(".experts." in name for name in shared_by_all)
    assert sum(len(rank - shared_by_all) for rank in ranks) == 48 * 128 * 3


def test_a_token_is_multiplied_with_few_of_the_experts(shared: Path) -> None:
    """3.3e9 of Qwen3-30B-A3B's 30.5e9, and 37e9 of DeepSeek-V3's 671e9, say their cards; 8.2e9 of the dense one's."""
    active = {}
    for name in ("Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-8B"):
        raw = json.loads((shared / "hf" / name / "config.json").read_text())
        active[name] = round(parameters_per_token(parse_checkpoint_config(raw)) / 1e9, 1)
    assert active == {"Qwen3-30B-A3B": 3.4, "DeepSeek-V3": 37.6, "Qwen3-8B": 8.2}


def test_a_family_without_its_file_names_the_file() -> None:
    with pytest.raises(UnsupportedModel, match=r"'qwen9' .* write models/qwen9\.py"):
        checkpoint_names("qwen9")


def test_a_tensor_that_is_named_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen3, "NAME_MAP", (*qwen3.NAME_MAP, ("other.norm.weight", "norm.weight", "")))
    with pytest.raises(AssertionError, match=r"models/qwen3\.py names the tensor of \('norm.weight', ''\) twice"):
        checkpoint_names("qwen3")


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (
            ("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.mlp.gate_up.weight", "up"),
            r"mlp\.gate_up\.weight \(part up\)",
        ),
        (("model.norm.weight", "norm.weight", ""), r"norm\.weight"),
    ],
)
def test_a_tensor_without_a_name_names_the_file_and_the_row(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[str, str, str], named: str
) -> None:
    assert lost in qwen3.NAME_MAP
    monkeypatch.setattr(qwen3, "NAME_MAP", tuple(row for row in qwen3.NAME_MAP if row != lost))
    with pytest.raises(
        UnsupportedModel, match=f"'qwen3' needs a tensor for .*{named}, .* models/qwen3\\.py, .* FAMILIES"
    ):
        layout(parse_checkpoint_config(tiny_config(Tiny())))

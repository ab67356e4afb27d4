"""Pooling by a model's files and pooler_config; options that are not implemented are refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.args.pooling import PoolingPlan, read_pooling
from quire.contracts.errors import ConfigError, InvalidParameter, ModelError, UnsupportedModel

OLD = dict.fromkeys(
    ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"], False
)


def of_old(*names: str) -> dict[str, Any]:
    """1_Pooling/config.json as sentence-transformers wrote it for years."""
    modes = {f"pooling_mode_{name}": name in names for name in OLD}
    return {"word_embedding_dimension": 8, "include_prompt": True} | modes


def write(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    if kinds:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        (of_old("mean_tokens"), "mean"),
        (of_old("lasttoken"), "last"),
        (of_old("cls_token"), "cls"),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_files_of_sentence_transformers_count(
    tmp_path: Path, pooling: dict[str, Any], method: str, normalize: bool
) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    plan = read_pooling(write(tmp_path, *kinds, pooling=pooling))
    assert plan == PoolingPlan(width=8, method=method, normalize=normalize, source="modules.json")
    plan.check_scores()


def test_without_files_it_is_the_last_token_and_ranks_nothing(tmp_path: Path) -> None:
    plan = read_pooling(write(tmp_path), {})
    assert plan == PoolingPlan(width=8, method="last", normalize=True, source="")
    assert "last token" in str(plan) and "normalized" in str(plan) and "default" in str(plan)
    with pytest.raises(InvalidParameter, match="pooler_config"):
        plan.check_scores()


@pytest.mark.parametrize(
    ("override", "method", "normalize"),
    [
        ({"pooling_type": "MEAN"}, "mean", True),
        ({"seq_pooling_type": "CLS", "use_activation": False}, "cls", False),
        ({"normalize": False, "pooling_type": None}, "last", False),
        ({"pooling_type": "LAST"}, "last", True),
    ],
)
def test_pooler_config_says_it_where_files_do_not(
    tmp_path: Path, override: dict[str, Any], method: str, normalize: bool
) -> None:
    plan = read_pooling(write(tmp_path), override)
    assert (plan.method, plan.normalize, plan.source) == (method, normalize, "pooler_config")
    plan.check_scores()


def test_pooler_config_wins_over_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path, "Transformer", "Pooling", pooling=of_old("mean_tokens"))
    plan = read_pooling(folder, {"normalize": True})
    assert (plan.method, plan.normalize, plan.source) == ("mean", True, "modules.json and pooler_config")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"pooling_type": "STEP"}, "MEAN, LAST or CLS"),
        ({"pooling_type": 3}, "MEAN, LAST or CLS"),
        ({"normalize": "yes"}, "true or false"),
        ({"dimensions": 4}, "'dimensions' is not implemented"),
    ],
)
def test_a_pooler_config_that_cannot_be_met(tmp_path: Path, override: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_pooling(write(tmp_path), override)


@pytest.mark.parametrize(
    ("kinds", "pooling", "said"),
    [
        (["Transformer", "Pooling", "Dense"], of_old("mean_tokens"), "2_Dense"),
        (["Transformer", "WeightedLayerPooling"], None, "WeightedLayerPooling"),
        (["Transformer", "Pooling"], of_old("max_tokens"), "max_tokens"),
        (["Transformer", "Pooling"], of_old("mean_tokens", "cls_token"), "cls_token and mean_tokens"),
        (["Transformer", "Pooling"], of_old(), "nothing"),
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_a_step_that_is_not_implemented_is_named(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any] | None, said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_pooling(write(tmp_path, *kinds, pooling=pooling), {"pooling_type": "MEAN"})


@pytest.mark.parametrize("text", ["{", "{}1", '[{"idx": 0}]', "[3]", "null"])
def test_damaged_files_are_named(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)


def test_a_pooling_step_without_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="1_Pooling"):
        read_pooling(write(tmp_path, "Transformer", "Pooling"))


def test_dimensions_are_the_first_ones_and_of_length_one_again() -> None:
    plan, vector = PoolingPlan(width=3), np.array([3.0, 4.0, 12.0], np.float32)
    np.testing.assert_allclose(plan.finish(vector, None), vector / 13, rtol=1e-6)
    np.testing.assert_allclose(plan.finish(vector, 2), [0.6, 0.8], rtol=1e-6)
    assert plan.finish(vector, 2).dtype == np.float32
    np.testing.assert_array_equal(PoolingPlan(width=3, normalize=False).finish(vector, 2), [3.0, 4.0])
    np.testing.assert_array_equal(plan.finish(np.zeros(3, np.float32), None), np.zeros(3))


@pytest.mark.parametrize("dimensions", [0, 4, -1, True, 2.0, "2"])
def test_dimensions_that_cannot_be_had(dimensions: Any) -> None:
    PoolingPlan(width=3).check(None)
    PoolingPlan(width=3).check(3)
    with pytest.raises(InvalidParameter, match=r"\[1, 3\]") as caught:
        PoolingPlan(width=3).check(dimensions)
    assert caught.value.param == "dimensions"

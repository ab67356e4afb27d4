"""Values over those of config.json, and keys that change nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs, read_checkpoint_config, read_raw_config
from quire.args.overrides import overridden
from quire.contracts.errors import ConfigError, ModelError

from ...support.tiny_models import Tiny, tiny_config

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def read(folder: Path, raw: dict[str, Any], given: dict[str, Any]) -> ModelArgs:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_checkpoint_config(folder, overrides=given)


def theta(args: ModelArgs) -> float:
    (rotation,) = args.rotations
    return rotation.rope.theta


def test_values_count_in_place_of_those_of_the_file_and_a_note_says_so(tmp_path: Path) -> None:
    raw = tiny_config(Tiny(family="qwen3"))
    args = read(tmp_path, raw, {"num_hidden_layers": 1, "layer_types": None, "tie_word_embeddings": True})
    assert args.num_layers == 1 and args.tie_word_embeddings
    assert f"num_hidden_layers 1 in place of {raw['num_hidden_layers']}" in args.notes[0]
    assert read_raw_config(tmp_path, {"num_hidden_layers": 1})["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    "old", [{"rope_theta": 500.0, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 500.0}}]
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_setting_replaces_its_other_spelling(tmp_path: Path, old: dict[str, Any], key: str) -> None:
    raw = {name: value for name, value in tiny_config(Tiny(family="qwen3")).items() if not name.startswith("rope")}
    args = read(tmp_path, raw | old, {key: YARN | ({"rope_theta": 500.0} if key == "rope_parameters" else {})})
    assert [one.rope.kind for one in args.rotations] == ["yarn"] and theta(args) == 500.0
    assert theta(read(tmp_path, raw | old, {key: YARN | {"rope_theta": 7.0}})) == 7.0


def test_parts_are_merged_and_other_objects_replaced() -> None:
    raw = {"text_config": {"a": 1, "b": 2}, "quantization_config": {"c": 3}, "torch_dtype": "float16"}
    given = {"text_config": {"b": 5}, "quantization_config": {"d": 4}, "dtype": "bfloat16"}
    assert overridden(raw, given) == given | {"text_config": {"a": 1, "b": 5}}
    assert raw["text_config"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_position_embedings": 8}, "no key max_position_embedings .* Did you mean max_position_embeddings"),
        ({"zzz": 8}, "no key zzz is read for this model. See the keys"),
        ({"initializer_range": 1}, "initializer_range changes nothing"),
    ],
)
def test_keys_that_nothing_reads_are_errors(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, tiny_config(Tiny(family="qwen3")), given)


def test_values_of_a_wrapped_model_lie_inside(tmp_path: Path) -> None:
    raw = {"model_type": "qwen3_vl", "text_config": tiny_config(Tiny(family="qwen3_vl_text"))}
    assert read(tmp_path, raw, {"text_config": {"max_position_embeddings": 48}}).max_position_embeddings == 48
    with pytest.raises(ConfigError, match="max_position_embeddings of the language model is inside of text_config"):
        read(tmp_path, raw, {"max_position_embeddings": 48})
    with pytest.raises(ConfigError, match="no key text_config.hidden_sizes"):
        read(tmp_path, raw, {"text_config": {"hidden_sizes": 48}})


def test_wrong_values_name_the_option(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json with hf_overrides: num_hidden_layers=-1 must be"):
        read(tmp_path, tiny_config(Tiny(family="qwen3")), {"num_hidden_layers": -1})

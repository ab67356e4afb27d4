"""Indexers by config.json: which layers share one, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.args.latent import LatentArgs
from quire.contracts.errors import ModelError, UnsupportedModel
from quire.weights.match import is_unread

from ...support.tiny_models import Tiny, tiny_config

RAW = tiny_config(Tiny(family="glm_moe_dsa"), indexer_types=None, num_hidden_layers=7, mlp_layer_types=None)


def sharing(raw: dict[str, Any]) -> list[int]:
    args = parse_checkpoint_config(raw)
    mixers = [one.mixer for one in args.layers]
    assert all(isinstance(one, LatentArgs) and one.index for one in mixers)
    return [layer for layer, one in enumerate(mixers) if isinstance(one, LatentArgs) and one.index and one.index.shared]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, []),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [3, 4, 5]),
        ({"index_topk_freq": 2}, [2, 4, 6]),
        ({"index_topk_pattern": "FSSFSSF", "index_topk_freq": 4}, [1, 2, 4, 5]),
        ({"index_topk_pattern": ["full"] * 6 + ["shared"]}, [6]),
        ({"indexer_types": ["full", "shared"] * 3 + ["full"], "index_topk_pattern": "FFFFFFF"}, [1, 3, 5]),
        ({"indexer_types": ["full"] * 7 + ["shared"], "num_mtp_layers": None, "num_nextn_predict_layers": 1}, []),
    ],
)
def test_layers_that_share_an_indexer(changes: dict[str, Any], layers: list[int]) -> None:
    """The layer that predicts has an indexer of its own."""
    assert sharing(RAW | changes) == layers


def test_the_schedule_of_a_real_configuration_is_the_list_beside_it(shared: Path) -> None:
    raw = json.loads((shared / "hf" / "GLM-5.2-FP8" / "config.json").read_text())
    listed = sharing(raw)
    assert len(listed) == 57 and sharing(raw | {"indexer_types": None}) == listed


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"indexer_types": ["shared"] * 7}, ModelError, "no layer before it"),
        ({"indexer_types": ["full"] * 3}, ModelError, "must name 7 layers"),
        ({"indexer_types": ["full"] * 6 + ["half"]}, ModelError, "each full or shared"),
        ({"index_topk_pattern": "FXF"}, ModelError, "signs F and S"),
        ({"index_topk_pattern": 3}, ModelError, "signs F and S"),
        ({"index_topk_freq": 0}, ModelError, "index_topk_freq"),
        ({"index_head_dim": 4}, ModelError, "below qk_rope_head_dim"),
        ({"indexer_rope_interleave": False}, UnsupportedModel, "rotates neighbours"),
        ({"rope_interleave": False}, UnsupportedModel, "rope_interleave=false"),
        ({"q_lora_rank": None}, UnsupportedModel, "without q_lora_rank"),
        ({"moe_router_dtype": "bfloat16"}, UnsupportedModel, "only float32"),
        ({"layer_types": ["indexed_attention"] * 6 + ["full_attention"]}, UnsupportedModel, "full_attention"),
        ({"model_type": "deepseek_v32", "indexer_rope_interleave": True}, UnsupportedModel, "rotates halves"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    raw = RAW | changes
    if "model_type" in changes:
        raw["architectures"] = ["DeepseekV32ForCausalLM"]
    with pytest.raises(error, match=words):
        parse_checkpoint_config(raw)


def test_stored_indexers_of_layers_that_share_one_are_not_read() -> None:
    args = parse_checkpoint_config(RAW | {"indexer_types": ["full", "shared"] * 3 + ["full"]})
    name = "model.layers.{}.self_attn.indexer.wk.weight"
    assert is_unread(name.format(1), args) and not is_unread(name.format(2), args)

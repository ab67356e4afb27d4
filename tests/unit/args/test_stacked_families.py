"""gpt-oss and MiniMax-M2 by config.json: published files, other spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.experts import Routing
from quire.args.layers import GroupedArgs
from quire.contracts.errors import UserError
from quire.contracts.parallel import Parallel
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout
from quire.plan.placement import ranks
from quire.text.defaults import load_eos_ids

MINIMAX = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "rope_theta": 5_000_000, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "attn_type_list": [1, 1], "shared_intermediate_size": 0, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def published(shared: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((shared / "hf" / "gpt-oss-20b" / "config.json").read_text())
    return raw


def read(raw: dict[str, Any], **changes: Any) -> ModelArgs:
    return parse_checkpoint_config({key: value for key, value in (raw | changes).items() if value is not ...})


def windows(args: ModelArgs) -> list[int | None]:
    mixers = [one.mixer for one in args.layers]
    grouped = [one for one in mixers if isinstance(one, GroupedArgs)]
    assert len(grouped) == len(mixers)
    assert all(one.scores.sinks and one.input_bias and one.output_bias for one in grouped)
    return [one.window for one in grouped]


def test_gpt_oss_as_published(published: dict[str, Any]) -> None:
    args = read(published)
    assert args.moe is not None
    assert args.moe.routing == Routing(num_experts=32, top_k=4, scoring="softmax", normalize=True, logit_bias=True)
    assert (args.moe.expert_size, args.moe.act) == (2880, "swiglu_oai")
    assert args.moe.biased and args.moe.stored == "paired blocks"
    assert windows(args) == [128, None] * 12 and args.dtype == "bfloat16"
    rope = args.mixers[0].rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.truncate) == ("yarn", 32.0, 4096, False)
    assert args.max_position_embeddings == 131_072 and args.norm.eps == 1e-5


def test_keys_of_older_files_of_gpt_oss(published: dict[str, Any]) -> None:
    older = read(
        published,
        layer_types=...,
        num_experts_per_tok=...,
        num_local_experts=...,
        num_experts=32,
        initial_context_length=4096,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False},
        sliding_window=...,
        attention_bias=...,
    )
    assert older.moe == read(published).moe and older.layers == read(published).layers


def test_names_of_tensors_decide_how_experts_are_stored(published: dict[str, Any]) -> None:
    """A dequantized checkpoint may keep its quantization_config, and a quantized one may have lost it."""
    plain = {f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    blocks = {f"{name}_blocks" for name in plain}
    for config, stored, form in (
        (published, plain, "paired columns"),
        (published, blocks, "paired blocks"),
        (published | {"quantization_config": None}, blocks, "paired blocks"),
        (published | {"quantization_config": None}, set[str](), "paired columns"),
        (published, set[str](), "paired blocks"),
    ):
        moe = as_stored(read(config), stored).moe
        assert moe is not None and moe.stored == form


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts_per_token": 8}, "experts_per_token=8 contradicts num_experts_per_tok=4"),
        ({"swiglu_limit": 6.0}, "swiglu_limit=6.0 is not implemented"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not implemented"),
        ({"swiglu_limit": "7"}, "swiglu_limit='7' must be a positive number"),
        ({"num_local_experts": 3}, "num_experts_per_tok=4 exceeds the 3 experts"),
    ],
    ids=str,
)
def test_other_math_of_gpt_oss_is_refused(published: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(published, **changes)


def test_slices_of_gpt_oss(published: dict[str, Any]) -> None:
    """2,880 numbers between gate and down are 90 blocks of 32: four ranks have 23, 23, 22 and 22 of them."""
    args = read(published)
    found = []
    for rank in ranks(args, Parallel(tp=4)):
        params = {param.name: param for param in layout(args, rank)}
        gate_up, down = (params[f"layers.3.mlp.experts.{name}"] for name in ("gate_up", "down"))
        assert gate_up.parts[31].expert == 31 and gate_up.parts[0].paired and not down.parts[0].paired
        assert gate_up.parts[0].start == 2 * down.parts[0].start and gate_up.parts[0].count == 2 * down.parts[0].count
        assert gate_up.parts[0].shape == (32, 5760, 2880) and down.parts[0].shape == (32, 2880, 2880)
        assert ("layers.3.mlp.experts.down_bias" in params) == (rank.place == 0)
        found.append((down.parts[0].start, down.parts[0].count))
    assert found == [(0, 736), (736, 736), (1472, 704), (2176, 704)]


def test_answers_of_gpt_oss_end_with_any_of_its_ends(shared: Path) -> None:
    assert {200_002, 199_999, 200_012} == set(load_eos_ids(shared / "hf" / "gpt-oss-20b"))


def test_minimax_m2() -> None:
    args = read(MINIMAX)
    (mixer,) = args.mixers
    assert isinstance(mixer, GroupedArgs) and (mixer.qk_norm, mixer.rotary_dim) == ("whole", 8)
    assert args.moe is not None
    assert args.moe.routing == Routing(num_experts=8, top_k=2, scoring="sigmoid", normalize=True, correction=True)
    assert read(MINIMAX, rotary_dim=..., partial_rotary_factor=0.5) == args
    assert not any("ignored" in note for note in args.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_qk_norm": False}, "use_qk_norm=False is not implemented"),
        ({"use_routing_bias": False}, "use_routing_bias=False is not implemented"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not implemented"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"attn_type_list": 3}, "attn_type_list"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not implemented"),
        ({"rotary_dim": 17}, "rotary_dim=17"),
    ],
    ids=str,
)
def test_layers_of_minimax_01_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(MINIMAX, **changes)

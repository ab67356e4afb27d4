"""Layers that predict several tokens (MTP) and have names of their own: told by config.json and by stored tensors."""

from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.layers import GroupedArgs
from quire.plan.as_stored import as_stored, with_prediction
from quire.plan.drafts import with_draft_layers
from quire.plan.layout import layout, stored_names
from quire.weights.match import is_unread

from ...support.tiny_models import Tiny, tiny_config

LAYER = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight")
COUNT = "mtp_num_hidden_layers"


def args_of(family: str = "qwen3_5_text", **keys: Any) -> ModelArgs:
    return parse_checkpoint_config(tiny_config(Tiny(family=family)) | keys)


@pytest.mark.parametrize(
    ("keys", "stored", "lack"),
    [
        ({COUNT: 1}, LAYER, ""),
        ({}, LAYER, ""),  # Qwen3-Next has no key
        ({COUNT: 1}, (), ""),  # nothing is known of the tensors
        ({COUNT: 1}, ("lm_head.weight",), "has none"),
        ({}, (), "has none"),
        ({COUNT: 2}, (), "has 2 of them"),
        ({COUNT: 1, "mtp_use_dedicated_embeddings": True}, LAYER, "an embedding of its own"),
    ],
)
def test_who_has_a_layer_that_can_draft(keys: dict[str, Any], stored: tuple[str, ...], lack: str) -> None:
    args = as_stored(args_of(**keys), stored)
    assert lack in args.prediction.lack and bool(lack) == bool(args.prediction.lack)
    assert len(args.layers) == args.num_layers + args.extra_layers and args.num_layers == 3
    assert any("(mtp.* of the checkpoint)" in note for note in args.notes) == bool(args.extra_layers)


def test_families_whose_layers_are_not_read() -> None:
    """Nemotron 3 has such layers."""
    assert "has none that is read" in args_of("nemotron_h", num_nextn_predict_layers=1).prediction.lack


def test_the_layer_attends_and_has_experts() -> None:
    args = as_stored(args_of("qwen3_next"), LAYER)
    last = args.layers[-1]
    assert isinstance(last.mixer, GroupedArgs) and last.mixer.gated and last.experts == args.moe
    drafting = with_prediction(args, drafting=1)
    own = set(stored_names(layout(drafting))) - set(stored_names(layout(args)))
    assert not drafting.notes and "mtp.layers.0.mlp.experts.7.up_proj.weight" in own
    assert {one.split(".")[0] for one in own} == {"mtp"}


@pytest.mark.parametrize(
    ("key", "asked", "shares"), [(True, None, 1), (True, False, 0), (False, True, 1), (None, None, 0)]
)
def test_passes_that_share_a_choice(key: bool | None, asked: bool | None, shares: int) -> None:
    """The key of GLM-5.2's config.json, or that of `speculative_config` in its place; of method mtp alone."""
    args = args_of("glm_moe_dsa", num_mtp_layers=1, index_share_for_mtp_iteration=key)
    given = {"num_speculative_tokens": 2, "index_share_for_mtp_iteration": asked}
    drafting = with_draft_layers(args, given | {"method": "mtp"})
    found = drafting.prediction.shared_choice(drafting.layers)
    assert found == (args.layers[0].mixer.index if shares else None)  # type: ignore[union-attr]
    assert args.prediction.shared_choice(args.layers) is None, "nothing drafts"


def test_tensors_without_a_place() -> None:
    """Without drafts all of the layer's tensors are skipped; with them, copies of the embedding alone."""
    args = as_stored(args_of(), LAYER)
    drafting = with_prediction(args, drafting=1)
    assert is_unread("mtp.layers.0.self_attn.odd.weight", args) and is_unread("mtp.embed_tokens.weight", drafting)
    assert not is_unread("mtp.layers.0.self_attn.odd.weight", drafting)
    assert not is_unread("mtp.fc.weight", args_of("glm4_moe"))

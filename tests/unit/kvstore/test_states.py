"""The arena of states: each layer's states by their names, with pending rows where drafts are verified."""

import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.blocks import KVGeometry
from quire.kvstore.states import StateArena
from quire.plan.kinds.interfaces import StateTypes
from quire.plan.kv_geometry import state_groups
from quire.plan.layout import alone

from ...support.tiny_models import Tiny, tiny_config

ROWS = 3


@pytest.mark.parametrize(("matrix", "drafts"), [("float32", 0), ("float32", 3), ("bfloat16", 3)])
@pytest.mark.parametrize("family", ["lfm2", "granite_mamba", "falcon_h1", "qwen3_5_text"])
def test_a_layer_has_its_states_by_name(family: str, matrix: str, drafts: int) -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family=family)))
    groups = state_groups(args, alone(args), StateTypes("bfloat16", matrix, drafts))
    arena = StateArena(KVGeometry(groups=(), states=groups), ROWS, torch.device("cpu"))
    kept = {layer for group in groups for layer in group.layers}
    assert kept and all((arena.view(layer) is not None) == (layer in kept) for layer in range(args.num_layers))
    for layer in kept:
        state = arena.view(layer)
        assert state is not None and (state.matrix is None) == (family == "lfm2")
        assert state.matrix is None or state.matrix.dtype == getattr(torch, matrix)
        assert state.columns.dtype == torch.bfloat16 and len(state.columns) == ROWS
        assert (state.pending is None) == (state.at is None) == (not drafts)
        if state.pending is not None and state.at is not None:
            assert state.pending.shape[:2] == (ROWS, 1 + drafts) and state.pending.dtype == torch.bfloat16
            assert state.pending.shape[2] >= state.columns.shape[2]
            assert state.at.shape == (ROWS, 1) and state.at.dtype == torch.int32

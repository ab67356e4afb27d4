"""Layers of every family by the kernels of a GPU, interpreted: hidden states are those of the reference kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.layers import NONE
from quire.assemble.kv_views import kv_views
from quire.kernels.attention import AttentionMeta
from quire.kernels.select import select_kernels
from quire.kernels.states import BothViews
from quire.layers.context import Build, StepContext
from quire.layers.decoder import Decoder
from quire.layers.stack import embedded, run_layers
from quire.plan.as_stored import with_prediction
from quire.plan.kinds.blocks import operations, score_features
from quire.plan.kv_geometry import kv_components, rank_geometry
from quire.plan.layout import alone, layout
from quire.plan.linears import linear_plans

from ..support.filled_models import experts_plan, fill, normal
from ..support.full import full_rows
from ..support.states import state_arena, state_meta
from ..support.tiny_models import FAMILIES, Tiny, tiny_config

CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # longer than the window of tiny models, 9
FIRST = (
    *("gemma3_text", "gpt_oss", "minimax_m2", "cohere2", "gemma4_moe", "ministral3", "llama4_text", "qwen3_next"),
    *("falcon_h1", "lfm2", "nemotron_moe"),
)


def hidden(args: ModelArgs, *, reference: bool) -> Tensor:
    """Hidden states [T, hidden] of a random model, with the kernels of a GPU or the references."""
    target, ops = "cpu" if reference else "cuda", operations(args)
    kernels = select_kernels(
        target,
        "float32",
        ops=ops,
        head_dim=max(one.head_dim for one in args.attending),
        attention_features=score_features(args) | {"window"},
        forced=dict.fromkeys(ops, "ref") if reference else None,
    )
    params = layout(args)
    geometry = rank_geometry(args, alone(args), dtype="float32", device="cpu", block_size=16)
    build = Build(
        torch.float32,
        CPU,
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, kernels.choices),
        moe=experts_plan(args, "float32", target, "ref" if reference else ""),
        kv_groups=geometry.groups,
    )
    model = Decoder(args, params, build)
    fill(model, normal(0.3))
    count = len(TOKENS)
    caches, states = list[tuple[Tensor, ...]](), state_arena(args, 1)
    for layer in range(args.num_layers):
        if (source := args.kept_by(layer)) != layer:
            caches.append(caches[source])
            continue
        own = args.layers[layer]
        if own.beside is None and (own.mixer == NONE or states.view(layer)):
            caches.append(states.view(layer) or ())
            continue
        size = next(group.block_size for group in geometry.groups if layer in group.layers)
        components = kv_components(args.layers[layer].mixer, "float32")
        caches.append(tuple(torch.zeros(2, part.num_heads, size, part.head_dim) for part in components))
    positions = torch.arange(count)
    metas = tuple(
        AttentionMeta(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            kv_slots=group.block_size + positions,
            block_tables=torch.ones(1, 1, dtype=torch.int32),
            max_query_len=count,
            kv_group=number,
        )
        for number, group in enumerate(geometry.groups)
    )
    views: list[Any] = list(kv_views([one.mixer for one in model.held], caches))
    views = [
        one if layer.beside is None else BothViews(one, states.view(i))
        for i, (one, layer) in enumerate(zip(views, args.layers, strict=True))
    ]
    ctx = StepContext(positions, metas, views, states=state_meta(metas[0].query_start, [count], [0]))
    return run_layers(model, *embedded(model, torch.tensor(TOKENS), ctx))


@pytest.mark.parametrize("family", [*FIRST, *full_rows(name for name in FAMILIES if name not in FIRST)])
def test_hidden_states(family: str) -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family=family, bias=bool(FAMILIES[family].biases))))
    args = with_prediction(args, layers=0)
    with torch.inference_mode():
        expected, actual = hidden(args, reference=True), hidden(args, reference=False)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))

"""Blocks cut into ranks, each with its own slices and heads: what the ranks sum is what one rank computes."""

from functools import partial

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.latent import LatentArgs
from quire.args.layers import NONE, RecurrentArgs
from quire.contracts.parallel import ALONE, Parallel, Rank
from quire.distributed import Group
from quire.distributed.mesh import RankGroups
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.index import IndexView
from quire.kernels.latent import LatentView
from quire.kernels.rope.rotary import Rotaries
from quire.kernels.select import select_kernels
from quire.kernels.states import NOTHING, BothViews, StateView
from quire.layers.context import Build, Loads, StepContext
from quire.layers.decoder import DecoderBlock
from quire.plan.kinds.blocks import operations, score_features
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.plan.placement import ranks
from quire.weights.units import load_units

from ...support.filled_models import experts_plan, sliced, stored_tensors
from ...support.simulated_groups import SimulatedRanks
from ...support.states import state_arena, state_meta
from ...support.tiny_models import FAMILIES, Tiny, tiny_config

CPU, TOKENS, BLOCK = torch.device("cpu"), 11, 8


def arguments(family: str) -> ModelArgs:
    """A tiny model with every bias that the family may have."""
    return parse_checkpoint_config(tiny_config(Tiny(family=family, bias=True)))


def last_layer(args: ModelArgs) -> int:
    """The last layer with a KV cache or states of its own, of those with experts if there are any."""
    layers = args.expert_layers if args.moe else range(args.num_layers)
    return max(layer for layer in layers if args.kept_by(layer) == layer)


def block(args: ModelArgs, rank: Rank, stored: dict[str, Tensor], tp: Group | None) -> DecoderBlock:
    """The last layer of a rank, with its slices of the checkpoint."""
    layer = last_layer(args)
    params = [param for param in layout(args, rank) if param.name.startswith(f"layers.{layer}.")]
    kernels = select_kernels(
        "cpu",
        "float32",
        ops=operations(args),
        head_dim=args.attending[0].head_dim,
        attention_features=score_features(args),
    )
    whole = args.moe is None or len(rank.expert_ids) == args.moe.routing.num_experts
    own = None if whole else tuple(rank.expert_ids)
    build = Build(
        torch.float32,
        CPU,
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, kernels.choices),
        own,
        RankGroups(tp=tp),
        moe=experts_plan(args),
    )
    made = DecoderBlock(args, layer, build)
    owners = {one.at: one for one in made.modules() if isinstance(one, Loads)}
    for unit in load_units(params):
        owners[unit.module].take(
            {
                raw.name: torch.cat([sliced(part, stored[part.stored]) for part in raw.parts]).to(torch.float32)
                for raw in unit.tensors
            },
            unit.place,
        )
    return made


def answer(args: ModelArgs, rank: Rank, made: DecoderBlock, hidden: Tensor) -> Tensor:
    """Run a prompt through a block with an empty cache of this rank's heads."""
    positions, blocks = torch.arange(TOKENS), -(-TOKENS // BLOCK)
    mixer = args.layers[last_layer(args)].mixer
    rotary = Rotaries(args.rotations, CPU)
    kv: KVView | LatentView | StateView | BothViews
    if mixer == NONE:
        kv = NOTHING
    elif isinstance(mixer, RecurrentArgs):
        kv = state_arena(args, 1, rank=rank).view(last_layer(args))
    elif isinstance(mixer, LatentArgs):
        kv = LatentView(
            torch.zeros(blocks + 1, 1, BLOCK, mixer.kv_rank),
            torch.zeros(blocks + 1, 1, BLOCK, mixer.rope_dim),
            index=mixer.index and IndexView(torch.zeros(blocks + 1, 1, BLOCK, mixer.index.head_dim)),
        )
    else:
        heads = made.attention.num_kv_heads
        kv = KVView(*torch.zeros(2, blocks + 1, heads, BLOCK, mixer.head_dim))
        if made.beside is not None:
            kv = BothViews(kv, state_arena(args, 1, rank=rank).view(last_layer(args)))
    table = torch.arange(1, blocks + 1, dtype=torch.int32)[None]
    meta = AttentionMeta(
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.tensor([TOKENS], dtype=torch.int32),
        table,
        BLOCK + positions,
    )
    inputs = torch.randn(TOKENS, args.num_layers, args.inputs, generator=torch.Generator().manual_seed(2))
    own = state_meta(meta.query_start, [TOKENS], [0])
    ctx = StepContext(positions, (meta,), [kv], inputs=inputs if args.inputs else None, states=own)
    out: Tensor = made(hidden.clone(), rotary.rows(positions, torch.float32), ctx, kv)
    return out


@pytest.mark.parametrize(
    "parallel", [Parallel(tp=2), Parallel(tp=4), Parallel(tp=2, experts=True), Parallel(tp=4, experts=True)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_of_ranks_is_one_rank(family: str, parallel: Parallel) -> None:
    args = arguments(family)
    if parallel.experts and args.moe is None:
        pytest.skip("no experts to place")
    stored = {name: tensor * 0.3 for name, tensor in stored_tensors(layout(args)).items()}
    hidden = torch.randn(TOKENS, args.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = next(ranks(args, ALONE))
        expected = answer(args, whole, block(args, whole, stored, None), hidden)
    threads = SimulatedRanks(parallel.size)
    every = [
        partial(answer, args, rank, block(args, rank, stored, group), hidden)
        for rank, group in zip(ranks(args, parallel), threads.groups, strict=True)
    ]
    for found in threads.run_each(every):
        torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)
    assert (expected - hidden).abs().max() > 0.1

"""Parts of the model by rank."""

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.mamba import MambaArgs
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel, share
from quire.plan.kinds.mamba import MambaKind
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, met
from quire.plan.placement import held_of, kv_heads, query_heads, ranks, stages

from ...support.changed_args import with_mixer, without_experts
from ...support.tiny_models import Tiny, tiny_config
from .test_collectives import args


def check_parallel(args: ModelArgs, parallel: Parallel) -> None:
    check(met(Inputs(args=args, parallel=parallel)))


def test_stages_as_every_number_of_layers_falls() -> None:
    assert stages(6, 1) == ((0, 6),)
    assert stages(61, 8) == ((0, 7), (7, 14), (14, 22), (22, 30), (30, 38), (38, 46), (46, 54), (54, 61))
    assert stages(7, 3) == ((0, 2), (2, 5), (5, 7)), "the one left goes to the stage before the last"
    assert stages(8, 3) == ((0, 3), (3, 6), (6, 8))
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            bounds = stages(layers, pp)
            sizes = [end - start for start, end in bounds]
            assert bounds[0][0] == 0 and bounds[-1][1] == layers and max(sizes) - min(sizes) <= 1
            assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:], strict=False))


def test_shares_are_contiguous_and_the_first_have_more() -> None:
    assert [share(10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_ranks_of_replicas_stages_and_places() -> None:
    found = list(ranks(args(), Parallel(tp=4, pp=2, dp=2, experts=True)))
    assert [rank.number for rank in found] == list(range(16))
    one = found[4 * 2 + 4 + 1]  # replica 1, stage 1, place 1
    assert (one.replica, one.stage, one.place, one.layers, query_heads(args(), one)) == (1, 1, 1, (3, 6), ((2, 4),))
    assert kv_heads(args(), one) == ((0, 1),), "two ranks share each of the two KV heads"
    assert kv_heads(args(), found[2]) == ((1, 2),)
    assert one.experts == (7, 8, 1), "the sixth of eight ranks of its stage, of which the first two have two experts"
    stage = [[*rank.expert_ids] for rank in found if rank.stage == 0]
    assert stage == [[0, 1], [2, 3], [4], [5], [6], [7], [8], [9]]
    assert [rank.last for rank in found] == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert len({held_of(args(), rank) for rank in found}) == 4, "two stages, and ranks of one expert or two"
    sliced = list(ranks(args(), Parallel(tp=2)))
    assert [rank.expert_ids for rank in sliced] == [range(10)] * 2


def test_experts_in_turn() -> None:
    """Expert e is on rank e % 4 of its stage, in slot e // 4; ranks with as many experts are of a kind."""
    found = list(ranks(args(), Parallel(tp=2, pp=2, dp=2, experts=True, round_robin=True)))
    stage = [rank for rank in found if rank.stage == 1]
    assert [[*rank.expert_ids] for rank in stage] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert all(stage[e % 4].expert_ids[e // 4] == e for e in range(10))
    assert len({held_of(args(), rank) for rank in found}) == 4 and [rank.number for rank in stage] == [2, 3, 6, 7]
    for alone in (Parallel(round_robin=True), Parallel(tp=2, round_robin=True)):
        assert [rank.expert_ids for rank in ranks(args(), alone)] == [range(10)] * alone.size


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (Parallel(tp=3), "^-tp 3: 8 attention heads cannot be divided by 3: use -tp 1, 2, 4 or 8.$"),
        (Parallel(pp=7), "-pp 7: the model has only 6 layers, and every stage needs a layer: use -pp 6 at most"),
        (
            Parallel(pp=2, layers=(3, 4)),
            "pipeline_layer_partition=3,4: 2 stages with 7 layers do not fit -pp 2 and the "
            "model's 6 layers: give 2 numbers that add up to 6",
        ),
        (Parallel(pp=3, layers=(3, 3)), "pipeline_layer_partition=3,3: 2 stages with 6 layers do not fit -pp 3"),
        (Parallel(tp=8, dp=2, experts=True), "10 experts are fewer than the 16 ranks .tp x dp. that share"),
        (
            Parallel(dp=1_000_000),
            "-dp 1000000: 1,000,000 ranks are more than the 4,096 that can be planned: lower a size",
        ),
    ],
)
def test_sizes_that_do_not_fit(parallel: Parallel, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parallel(args(), parallel)


@pytest.mark.parametrize(
    ("family", "tp", "said"),
    [
        ("lfm2", 3, "-tp 3: 64 convolution channels and 4 attention heads cannot be divided by 3: use -tp 1, 2 or 4."),
        ("lfm2", 8, "-tp 8: 4 attention heads cannot be divided by 8: use -tp 1, 2 or 4."),
        ("granite_moe", 3, "-tp 3: 8 Mamba heads and 4 attention heads cannot be divided by 3: use -tp 1, 2 or 4."),
        ("nemotron_h", 3, "-tp 3: 8 Mamba heads and 4 attention heads cannot be divided by 3: use -tp 1, 2 or 4."),
        ("qwen3_next", 3, "-tp 3: 4 key heads of recurrent layers and 4 attention heads cannot be divided by 3"),
        ("kimi_linear", 3, "-tp 3: 8 key heads of recurrent layers and 4 attention heads cannot be divided by 3"),
    ],
)
def test_what_ranks_cannot_divide_is_named(family: str, tp: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_parallel(parse_checkpoint_config(tiny_config(Tiny(family=family))), Parallel(tp=tp))
    assert str(refused.value).startswith(said)


def test_groups_of_mamba_heads_that_ranks_cannot_share_are_named() -> None:
    found = MambaKind(MambaArgs(heads=12, groups=3, head_dim=8, state_dim=8))
    assert [found.uneven(tp) for tp in (1, 2, 3, 5)] == ["", "3 groups of Mamba heads", "", "12 Mamba heads"]


def test_sizes_that_do_not_fit_heads_or_experts() -> None:
    check_parallel(args(), Parallel(tp=8, experts=True))
    with pytest.raises(ConfigError, match="3 KV heads can be neither .* evenly among 2 ranks: use -tp 1, 3, 6 or 12"):
        check_parallel(with_mixer(args(), num_kv_heads=3, num_heads=12), Parallel(tp=2))
    with pytest.raises(ConfigError, match="has no experts"):
        check_parallel(without_experts(args()), Parallel(dp=2, experts=True))


def test_only_sizes_that_differ_from_one_are_named() -> None:
    assert str(Parallel()) == "one device"
    assert str(Parallel(tp=4, dp=2, experts=True)) == "-tp 4 -dp 2 --enable-expert-parallel"

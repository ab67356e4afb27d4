"""The registry and the families agree, and a model's KV geometry is known without torch."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import structs

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.families import FAMILIES
from quire.assemble.build import build_model
from quire.contracts.blocks import KVComponent, KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import ALONE, Parallel
from quire.kernels.linear_plan import RowRange
from quire.kernels.select import Choice
from quire.layers.context import StepContext
from quire.layers.linear import Linear
from quire.plan.drafts import joined
from quire.plan.kinds.blocks import operations
from quire.plan.kv_geometry import kv_components, layer_groups, rank_geometry
from quire.plan.layout import checkpoint_names, layout
from quire.plan.linears import linear_plans
from quire.plan.placement import ranks
from quire.plan.weight_bytes import unpacked_bytes

from ...support.filled_models import built, fill, planned
from ...support.tiny_models import FAMILIES as TESTED
from ...support.tiny_models import Tiny, tiny_config

ROOT = Path(__file__).resolve().parents[3]
ARGS = parse_checkpoint_config(
    {
        "model_type": "qwen3",
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
)


def test_every_family_has_a_file() -> None:
    for family in FAMILIES:
        assert checkpoint_names(family)


def test_every_family_has_its_tests() -> None:
    tested = {case.of or row for row, case in TESTED.items()}
    assert sorted(tested) == sorted(FAMILIES), "give every family a row in FAMILIES of tests/support/tiny_models.py"


def test_a_family_without_a_row_of_its_own_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tiny_models", "nosuch", "x"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        cwd=ROOT,
    )
    assert done.returncode == 1 and done.stderr.startswith("nosuch has no row in FAMILIES of tests/support/tiny_models")


def test_layers_that_share_an_indexer_keep_fewer_components_in_the_same_group() -> None:
    kinds = ["full", "shared", "shared", "full", "shared"]
    raw = tiny_config(Tiny(family="glm_moe_dsa"), num_hidden_layers=5, indexer_types=kinds, mlp_layer_types=None)
    args = parse_checkpoint_config(raw)
    assert layer_groups(args) == [[0, 1, 2, 3, 4]]
    first, second = ranks(args, Parallel(pp=2, layers=(2, 3)))
    (group,) = rank_geometry(args, first, dtype="float32", device="cpu", block_size=8).groups
    assert (group.layers, group.fewer) == ((0, 1), ((1, 2),))
    assert [[one.name for one in group.of(layer)] for layer in (0, 1)] == [
        ["latent", "rope", "index"],
        ["latent", "rope"],
    ]
    assert group.page_bytes == sum(one.num_bytes(8) for one in (*group.of(0), *group.of(1)))
    (group,) = rank_geometry(args, second, dtype="float8_e4m3fn", device="cpu", block_size=8).groups
    assert group.layers == (0, 1, 2) and group.fewer == ((0, 2), (2, 2))
    assert [(one.name, one.head_dim, one.dtype) for one in group.of(1)[2:]] == [
        ("index", 16, "float8_e4m3fn"),
        ("index_scale", 1, "float32"),
    ]


def test_kv_components() -> None:
    assert kv_components(ARGS.mixers[0], "bfloat16") == tuple(
        KVComponent(name, 2, 8, "bfloat16", 2) for name in ("k", "v")
    )


def test_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int3"):
        built(ARGS, "int3", forced={op: "ref" for op in operations(ARGS)})


def test_a_model_holds_nothing_before_it_is_loaded() -> None:
    model = built(ARGS)
    assert not list(model.named_parameters())
    assert unpacked_bytes(model.layout, "float32") == 2 * unpacked_bytes(model.layout, "bfloat16") > 0


MOE = parse_checkpoint_config(
    {
        "model_type": "mixtral",
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)


def test_uniform_routing_takes_the_routers_place() -> None:
    """Zero weights would send every token to experts 0 and 1."""

    def hits(routing: str) -> set[int]:
        model = built(MOE, routing=routing, load_format="dummy")
        fill(model, lambda raw: torch.zeros(raw.shape))
        seen: list[torch.Tensor] = []
        layer = model.layers[1].mlp
        layer.on_routing = lambda weights, ids: seen.append(ids)
        layer(torch.zeros(64, 16), model.layers[1].mlp_branch, StepContext(torch.zeros(64, dtype=torch.int64), (), []))
        return set(seen[0].flatten().tolist())

    assert hits("model") == {0, 1} and hits("uniform") == set(range(8))


def test_uniform_routing_reaches_the_experts_of_a_stage() -> None:
    model = built(MOE, routing="uniform", load_format="dummy", parallel=Parallel(pp=2), number=1)
    assert [layer.mlp.choose is not None for layer in model.layers] == [True] * len(model.layers)


def test_uniform_routing_needs_experts() -> None:
    with pytest.raises(ConfigError, match="routing=uniform"):
        built(ARGS, routing="uniform", load_format="dummy")


def test_facts_do_not_import_torch() -> None:
    code = (
        "import sys, quire.plan.kv_geometry, quire.plan.layout, quire.models.deepseek_v3,"
        " quire.platforms.cpu, quire.weights.folder, quire.assemble.obtain, quire.entry.obtain; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_a_linear_layer_runs_the_kernel_of_its_plan() -> None:
    """Another layout in the plan of one layer, and that layer alone is packed and run by another kernel."""
    changed, plan = "layers.1.mlp.down", planned(ARGS)
    other = msgspec.structs.replace(plan.linears[changed], layout="ref", ranges=(RowRange(None, "ref"),), features=())
    model = build_model(msgspec.structs.replace(plan, linears=plan.linears | {changed: other}))
    kernels = {one.at: one.kernel.__name__.rpartition(".")[2] for one in model.modules() if isinstance(one, Linear)}
    assert kernels.pop(changed) == "ref" and set(kernels.values()) == {model.kernels.linear.__name__.split(".")[-1]}
    assert model.kernels.linear.__name__ != "quire.kernels.linear.ref"


def test_scores_that_must_be_exact_are_planned_for_the_reference() -> None:
    """The reference replaces a kernel that rounds the scores; other layers keep the kernel."""
    args = parse_checkpoint_config(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 20,
            "hidden_size": 16,
            "intermediate_size": 24,
            "q_lora_rank": None,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "kv_lora_rank": 8,
        }
    )
    for features, kernel in (((), "ref"), (("exact",), "fast")):
        plans = linear_plans(args, layout(args), [Choice("linear", "fast", "because", features=features)])
        assert plans["layers.0.mlp.router"].layout == kernel
        assert {one.layout for name, one in plans.items() if not name.endswith(".router")} == {"fast"}


def windowed(pattern: str, window: int = 16) -> ModelArgs:
    """The model with a layer for each letter: S has a sliding window, F has none."""
    full = ARGS.layers[0]
    sliding = structs.replace(full, mixer=structs.replace(full.mixer, window=window))
    return replace(ARGS, layers=tuple(sliding if one == "S" else full for one in pattern))


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("FFFF", [4]),
        ("SSSS", [4]),
        ("SFSFSF", [3, 3]),
        ("SSSSSF" * 8, [8] * 6),
        ("SSSSSF" * 4 + "SS", [4] * 5 + [3] * 2),  # 22 with a window, 4 without
        ("SSSSSF" * 5 + "SSSS", [5] * 5 + [4] + [5]),  # 29 and 5
        ("S" * 13 + "F" * 12, [13, 12]),  # nearly as many: no group is divided
        ("F" * 21 + "S" * 7, [7] * 4),
    ],
)
def test_layers_are_divided_into_groups_of_about_equal_size(pattern: str, sizes: list[int]) -> None:
    args = windowed(pattern)
    groups = layer_groups(args)
    assert sorted(map(len, groups)) == sorted(sizes)
    assert sorted(layer for group in groups for layer in group) == list(range(len(pattern)))
    assert all(len({pattern[layer] for layer in group}) == 1 for group in groups)


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_have_the_same_groups_and_equal_pages(pp: int) -> None:
    """A request has the same block tables on every stage; each has its layers of every group."""
    args = windowed("SSSSSF" * 8)
    whole = [*layer_groups(args)]
    stages = [
        rank_geometry(args, rank, dtype="bfloat16", device="cpu", block_size=16)
        for rank in ranks(args, Parallel(pp=pp))
    ]
    assert all(stage.windows == stages[0].windows == (*[16] * 5, None) for stage in stages)
    for rank, stage in zip(ranks(args, Parallel(pp=pp)), stages, strict=True):
        held = [[rank.layers[0] + layer for layer in group.layers] for group in stage.groups]
        assert held == [[layer for layer in group if layer in range(*rank.layers)] for group in whole]
        assert len({group.page_bytes for group in stage.groups}) == 1 and stage.page_bytes == 8 // pp * 2 * 512


def unequal(pattern: str, heads: int = 1, dim: int = 8) -> ModelArgs:
    """The model with a layer for each letter: S has a window and 2 KV heads of size 8, F has `heads` of size `dim`."""
    full = ARGS.layers[0]
    kinds = {
        "S": structs.replace(full.mixer, window=16),
        "F": structs.replace(full.mixer, num_kv_heads=heads, head_dim=dim),
    }
    return replace(ARGS, layers=tuple(structs.replace(full, mixer=kinds[one]) for one in pattern))


@pytest.mark.parametrize(
    ("pattern", "kind", "sizes"),
    [
        ("SSSSSF" * 4, (1, 8), [16] * 5 + [32]),  # Gemma 4: half as many bytes per token
        ("FSSSSS" * 4, (1, 8), [32] + [16] * 5),
        ("SF" * 3, (1, 4), [16, 64]),
        ("SF" * 3, (1, 6), [16, 32]),  # 12 bytes of 32: two fit, four do not
        ("SF" * 3, (2, 12), [16, 16]),  # 48 of 32
        ("SF" * 3, (4, 16), [64, 16]),  # the layers with a window have less
        ("SSSSF", (1, 8), [16] * 4 + [32]),
        ("S" * 13 + "F" * 12, (1, 8), [16, 32]),
        ("S" * 12 + "F" * 13, (1, 8), [16, 16]),  # a block of 13 layers and 32 tokens has no room in the page
        ("SFFF" * 3, (2, 8), [16] * 4),  # equal layers in other groups
    ],
)
def test_layers_with_fewer_bytes_get_more_tokens_per_block(
    pattern: str, kind: tuple[int, int], sizes: list[int]
) -> None:
    geometry = geometry_of(unequal(pattern, *kind))
    assert list(geometry.block_sizes) == sizes and geometry.block_size == 16 and geometry.hit_size == max(sizes)
    chosen = [msgspec.structs.replace(group, block_size=16) for group in geometry.groups]
    assert geometry.page_bytes == max(group.page_bytes for group in chosen), "no page grows"
    assert geometry.request_blocks(1000, 64) <= sum(group.most_blocks(1000, 64) for group in chosen)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 64), (32, 128), (32, 16)])
def test_block_sizes_can_be_chosen_by_group(sizes: tuple[int, int]) -> None:
    args = windowed("SFSF")
    (rank,) = ranks(args, ALONE)
    geometry = rank_geometry(args, rank, dtype="bfloat16", device="cpu", block_size=None, sizes=sizes)
    assert geometry.block_sizes == sizes and geometry.page_bytes == 2 * 2 * 2 * 2 * 8 * max(sizes)


def test_the_default_block_is_that_of_the_group_with_the_most_bytes() -> None:
    args = unequal("SF")
    (rank,) = ranks(args, ALONE)
    for device, size in (("cpu", 32), ("cuda", 128)):
        found = rank_geometry(args, rank, dtype="bfloat16", device=device, block_size=None)
        assert found.block_sizes == (size, 2 * size)


@pytest.mark.parametrize(("tp", "sizes"), [(1, (16, 32)), (2, (16, 16))])
def test_ranks_that_hold_equal_heads_have_equal_blocks(tp: int, sizes: tuple[int, int]) -> None:
    """Two ranks share the one head of the layers with full attention: each has as many as of the others."""
    args = unequal("SF")
    for rank in ranks(args, Parallel(tp=tp)):
        assert rank_geometry(args, rank, dtype="bfloat16", device="cpu", block_size=16).block_sizes == sizes


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_have_the_same_block_sizes(pp: int) -> None:
    args = unequal("SSSSSF" * 8)
    stages = [
        rank_geometry(args, rank, dtype="bfloat16", device="cpu", block_size=16)
        for rank in ranks(args, Parallel(pp=pp))
    ]
    assert {stage.block_sizes for stage in stages} == {(*[16] * 5, 32)}
    for stage in stages:
        assert len({group.page_bytes for group in stage.groups}) == 1


def test_layers_that_differ_in_rotation_share_a_group() -> None:
    args = windowed("SFSF")
    assert len(args.mixers) == 2
    first = structs.replace(args.layers[0].mixer, qk_norm=not args.layers[0].mixer.qk_norm)
    mixed = replace(args, layers=(structs.replace(args.layers[0], mixer=first), *args.layers[1:]))
    assert len(mixed.mixers) == 3 and layer_groups(mixed) == layer_groups(args) == [[0, 2], [1, 3]]


def test_a_draft_model_of_two_groups_joins_a_model_of_two() -> None:
    """Its layers take the blocks of the groups that they join; a group that joins none has its own."""
    own = geometry_of(unequal("SSF"))
    both = joined(own, geometry_of(unequal("SF")))
    assert both.block_sizes == own.block_sizes and sum(group.num_drafts for group in both.groups) == 2
    assert [(one.layers, one.num_drafts) for one in both.groups] == [((0, 3), 1), ((1,), 0), ((2, 4), 1)]
    alone = joined(geometry_of(windowed("SS")), geometry_of(unequal("SF")))
    assert alone.block_sizes == (16, 32) and alone.block_size == 16 and alone.hit_size == 32


def geometry_of(args: ModelArgs) -> KVGeometry:
    """The KV cache of a model on one device."""
    (rank,) = ranks(args, ALONE)
    return rank_geometry(args, rank, dtype="bfloat16", device="cpu", block_size=16)


def test_a_draft_model_joins_the_group_with_its_window() -> None:
    for pattern, groups in (
        ("F", [((0,), 0), ((1,), 0), ((2, 3), 1)]),
        ("SF", [((0, 3), 1), ((1,), 0), ((2, 4), 1)]),
    ):
        both = joined(geometry_of(windowed("SSF")), geometry_of(windowed(pattern)))
        assert [(group.layers, group.num_drafts) for group in both.groups] == groups
    own, other = geometry_of(windowed("SS")), geometry_of(windowed("F"))
    alone = joined(own, other)
    assert [(one.layers, one.window, one.num_drafts) for one in alone.groups] == [((0, 1), 16, 0), ((2,), None, 1)]
    assert alone.groups[1].of(2) == other.groups[0].components and alone.page_bytes == own.page_bytes

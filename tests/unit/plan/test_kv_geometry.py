"""The registry and the families agree, and a model's KV geometry is known without torch."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.args.families import FAMILIES
from quire.assemble.build import build_model
from quire.contracts.blocks import KVComponent
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.kernels.linear.plan import RowRange
from quire.kernels.select import Choice
from quire.layers.context import StepContext
from quire.layers.linear import Linear
from quire.plan.kinds.blocks import operations
from quire.plan.kv_geometry import kv_components
from quire.plan.layout import checkpoint_names, layout
from quire.plan.linears import linear_plans
from quire.plan.weight_bytes import unpacked_bytes

from ...support.filled_models import built, fill, planned
from ...support.tiny_models import FAMILIES as TESTED

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
    assert sorted(TESTED) == sorted(FAMILIES), "give every family a row in FAMILIES of tests/support/tiny_models.py"


def test_a_family_without_a_row_of_its_own_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tiny_models", "nosuch", "x"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        cwd=ROOT,
    )
    assert done.returncode == 1 and done.stderr.startswith("nosuch has no row in FAMILIES of tests/support/tiny_models")


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
        layer(torch.zeros(64, 16), model.norm, StepContext(torch.zeros(64, dtype=torch.int64), (), []))
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

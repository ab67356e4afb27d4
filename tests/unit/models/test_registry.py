"""The registry and the families agree, and a model's KV geometry is known without torch."""

import importlib
import subprocess
import sys

import pytest
import torch

from quire.config.checkpoint import FAMILIES, parse_checkpoint_config
from quire.contracts.blocks import KVComponent
from quire.contracts.errors import ConfigError
from quire.models.registry import build_model, kv_components, unpacked_bytes
from quire.platforms.cpu import read_cpu_facts

from ...filled_models import fill

ARGS = parse_checkpoint_config(
    {
        "model_type": "qwen3", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }
)  # fmt: skip


def test_every_family_has_a_file() -> None:
    for family in FAMILIES:
        assert importlib.import_module(f"quire.models.{family}").NAME_MAP


def test_kv_components() -> None:
    assert kv_components(ARGS, "bfloat16") == tuple(KVComponent(name, 2, 8, "bfloat16", 2) for name in ("k", "v"))


def test_wrong_dtype_or_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="int3"):
        build_model(ARGS, dtype="int3", device="cpu", platform=read_cpu_facts())
    with pytest.raises(ConfigError, match="cuda"):
        build_model(ARGS, dtype="float32", device="cuda", platform=read_cpu_facts())


def test_a_model_holds_nothing_before_it_is_loaded() -> None:
    model = build_model(ARGS, dtype="float32", device="cpu", platform=read_cpu_facts())
    assert not list(model.named_parameters())
    assert unpacked_bytes(model.layout, "float32") == 2 * unpacked_bytes(model.layout, "bfloat16") > 0


MOE = parse_checkpoint_config(
    {
        "model_type": "mixtral", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)  # fmt: skip


def test_uniform_routing_takes_the_routers_place() -> None:
    """Zero weights would send every token to experts 0 and 1."""
    def hits(routing: str) -> set[int]:
        model = build_model(MOE, dtype="float32", device="cpu", platform=read_cpu_facts(), routing=routing)
        fill(model, lambda raw: torch.zeros(raw.shape))
        seen: list[torch.Tensor] = []
        layer = model.layers[1].mlp
        layer.on_routing = lambda weights, ids: seen.append(ids)
        layer(torch.zeros(64, 16), model.norm, None)
        return set(seen[0].flatten().tolist())

    assert hits("model") == {0, 1} and hits("uniform") == set(range(8))


def test_uniform_routing_needs_experts() -> None:
    with pytest.raises(ConfigError, match="routing=uniform"):
        build_model(ARGS, dtype="float32", device="cpu", platform=read_cpu_facts(), routing="uniform")


def test_facts_do_not_import_torch() -> None:
    code = (
        "import sys, quire.models.registry, quire.models.layout, quire.models.deepseek_v3,"
        " quire.platforms.cpu, quire.weights.files, quire.weights.folder; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0

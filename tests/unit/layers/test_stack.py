"""The loop over layers: ranges, taps, and layers that are alike."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels.attention import AttentionMeta, KVView
from quire.layers.context import StepContext
from quire.layers.stack import Model, first_of_each_kind, run_layers
from quire.weights.dummy import load_dummy

from ...support.filled_models import built, fill, normal

LAYERS = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """A dataclass without a dictionary."""

    number: int


def make() -> tuple[Model, StepContext, torch.Tensor]:
    config = {
        "model_type": "llama",
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 64,
    }
    model = built(parse_checkpoint_config(config))
    fill(model, normal(0.3))
    kv = [KVView(*torch.zeros(2, 2, 2, 8, 8)) for _ in range(LAYERS)]
    meta = AttentionMeta([0, 5], [5], torch.tensor([[1]], dtype=torch.int32), torch.arange(8, 13))
    return model, StepContext(torch.arange(5), (meta,), kv), model.embed(torch.arange(5))


@torch.inference_mode()
def test_taps_see_every_layer_and_change_nothing() -> None:
    model, ctx, hidden = make()
    seen: list[tuple[int | str, torch.Tensor]] = []
    tapped = run_layers(model, hidden, ctx, tap=lambda key, value: seen.append((key, value)))
    plain = run_layers(model, hidden, ctx)
    assert [key for key, _ in seen] == ["embed", 0, 1, 2]
    assert torch.equal(seen[0][1], hidden) and torch.equal(seen[-1][1], tapped) and torch.equal(plain, tapped)
    assert not torch.equal(seen[1][1], seen[2][1])


@torch.inference_mode()
def test_ranges_compose() -> None:
    model, ctx, hidden = make()
    whole = run_layers(model, hidden, ctx)
    half = run_layers(model, run_layers(model, hidden, ctx, layers=range(2)), ctx, layers=range(2, LAYERS))
    assert torch.equal(whole, half)
    assert torch.equal(run_layers(model, hidden, ctx, layers=()), hidden)


def test_layers_that_launch_the_same_are_one_kind() -> None:
    """Other numbers in the same places make no kind; a size, an option, a place in memory that is not even does."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [2],
        "max_position_embeddings": 64,
    }
    quantized = {"quant_method": "online fp8"}
    for routing, quantization in (("model", quantized), ("model", None), ("uniform", None)):
        model = built(
            parse_checkpoint_config(config),
            forced={"linear": "ref"},
            routing=routing,
            load_format="dummy",
            quantization=quantization,
        )
        load_dummy(model)
        layers: list[Any] = list(model.layers)
        assert first_of_each_kind(layers) == [0, 2]
    views = [KVView(*torch.zeros(2, 2, 2, 8, 8)) for _ in layers]
    assert first_of_each_kind(zip(layers, views, strict=True)) == [0, 2]
    layers[3].attention.scale *= 2
    layers[4].attention_branch.before.weight = torch.zeros(17)[1:]
    assert first_of_each_kind(layers) == [0, 2, 3, 4]
    even, odd = (partial(torch.add, torch.zeros(18)[at:][:16]) for at in (0, 1))
    things = [even, partial(torch.add, torch.ones(16)), odd, Slot(1), Slot(1), Slot(2), Slot, object(), object()]
    assert first_of_each_kind(things) == [0, 2, 3, 5, 6, 7, 8]

"""The loop over layers: ranges and taps."""

import torch

from quire.config.checkpoint import parse_checkpoint_config
from quire.kernels.attention import AttentionMeta, KVView
from quire.layers.context import StepContext
from quire.layers.stack import Model, run_layers
from quire.models.registry import build_model
from quire.platforms.cpu import read_cpu_facts
from quire.weights.dummy import load_dummy

LAYERS = 3


def make() -> tuple[Model, StepContext, torch.Tensor]:
    config = {
        "model_type": "llama", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 64,
    }  # fmt: skip
    model = build_model(parse_checkpoint_config(config), dtype="float32", device="cpu", platform=read_cpu_facts())
    load_dummy(model)
    for _, parameter in model.named_parameters():
        parameter.data.mul_(500)
    model.pack()
    kv = [KVView(*torch.zeros(2, 2, 2, 8, 8)) for _ in range(LAYERS)]
    meta = AttentionMeta([0, 5], [5], torch.tensor([[1]], dtype=torch.int32), torch.arange(8, 13))
    return model, StepContext(torch.arange(5), meta, kv), model.embed(torch.arange(5))


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

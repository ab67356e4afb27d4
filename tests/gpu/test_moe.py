"""Layers with experts on a GPU: with shared experts on a second stream, the result is one stream's, bit for bit."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quire.bench
from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.kernels import pdl, triton_runtime
from quire.kernels.select import select_kernels
from quire.layers import moe
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.moe import MoE
from quire.plan.kinds.blocks import operations
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.worker.graphs import Graphs

from ..support.filled_models import experts_plan, fill_layer
from ..support.tiny_models import Tiny, tiny_config

if triton_runtime.missing() or triton_runtime.INTERPRETED:
    pytest.skip(triton_runtime.missing() or "kernels are interpreted", allow_module_level=True)

LAYERS = 8
LITE = Path(quire.bench.__file__).with_name("models") / "deepseek-v2-lite" / "config.json"
Layers = list[tuple[MoE, Branch]]
CONTEXT = StepContext(torch.zeros(0, dtype=torch.int64), (), [])  # of one replica, without padding


@pytest.fixture(autouse=True, params=[False, True], ids=["alone", "dependent"])
def launch_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without and with programmatic dependent launch."""
    monkeypatch.setattr(pdl, "ENABLED", request.param)
    with torch.inference_mode():
        yield


def arguments(name: str) -> ModelArgs:
    """DeepSeek-V2-Lite with a quarter of its experts, or a tiny model whose shared expert has a gate."""
    if name == "qwen2_moe":
        return parse_checkpoint_config(tiny_config(Tiny(family=name)))
    return parse_checkpoint_config(json.loads(LITE.read_text()) | {"n_routed_experts": 16})


def build(args: ModelArgs, device: torch.device) -> Layers:
    """Random layers in a row, each with its branch."""
    torch.manual_seed(0)
    kernels = select_kernels("cuda", "bfloat16", ops=operations(args), head_dim=args.attending[0].head_dim)
    assert args.moe is not None
    params, first = layout(args), min(args.expert_layers)
    built = Build(
        torch.bfloat16,
        device,
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, kernels.choices),
        moe=experts_plan(args, "bfloat16", "cuda"),
    )
    own = args.layers[first]
    layers = [
        (MoE(args.moe, f"layers.{first}.mlp", args.hidden_size, built), Branch("mlp", own, args.norm, built))
        for _ in range(LAYERS)
    ]
    for layer, branch in layers:
        fill_layer(layer, built, lambda raw: torch.randn(raw.shape) * raw.shape[-1] ** -0.5)
        assert branch.before is not None
        weight = torch.empty(args.hidden_size, device=device, dtype=torch.bfloat16).uniform_(0.5, 1.5)
        branch.before.take({"weight": weight}, 0)
        assert layer.forks
    return layers


def chain(layers: Layers, given: Tensor, forks: bool) -> Tensor:
    """All layers, with or without a second stream; `given` stays."""
    hidden = given.clone()
    for layer, branch in layers:
        layer.forks = forks
        hidden = layer.forward(hidden, branch, CONTEXT)  # not by its call, whose arguments have no types
    return hidden


def slow(layers: Layers, stream: str, patch: pytest.MonkeyPatch) -> None:
    """Delay a stream in every layer: at the start of its work, or before the fork."""

    def late(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wait(*given: Any, **named: Any) -> Tensor:
            torch.cuda._sleep(300_000)
            return work(*given, **named)

        return wait

    for layer, branch in layers:
        assert layer.shared is not None
        module = {"side": layer.shared.gate_up, "main": layer.experts, "both": branch.before}.get(stream)
        if module is not None:
            patch.setattr(module, "forward", late(module.forward))


@pytest.mark.parametrize("late", ["", "side", "main", "both"])
@pytest.mark.parametrize("tokens", [8, 64, 256])
@pytest.mark.parametrize("name", ["deepseek_v2", "qwen2_moe"])
def test_two_streams_are_as_one(
    device: torch.device, name: str, tokens: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many layers in a row, launched one by one and captured; replays follow their input."""
    args = arguments(name)
    layers, graphs, kept = build(args, device), Graphs(), dict[str, Tensor]()
    given = torch.randn(tokens, args.hidden_size, device=device).bfloat16()
    slow(layers, late, monkeypatch)

    def work() -> None:
        kept["found"] = chain(layers, given, True)

    work()
    graphs.capture(("layers", tokens, 0), work)
    captured = kept["found"]
    for _ in range(3):
        given.normal_()
        expected = chain(layers, given, False)
        assert not expected.isnan().any() and not torch.equal(expected, given)
        assert torch.equal(chain(layers, given, True), expected)
        captured.fill_(torch.nan)
        graphs.run(("layers", tokens, 0), work)
        assert torch.equal(captured, expected)


def test_steps_of_many_sizes_share_the_memory(device: torch.device) -> None:
    """Memory that one step leaves is taken by the next while it runs; nothing waits in between."""
    args = arguments("deepseek_v2")
    layers, graphs, sizes = build(args, device), Graphs(), (1024, 256, 64, 8, 5, 4)
    kept: dict[int, Tensor] = {}
    given = {size: torch.randn(size, args.hidden_size, device=device).bfloat16() for size in sizes}
    expected = {size: chain(layers, given[size], False) for size in sizes}

    def keep(size: int) -> None:
        kept[size] = chain(layers, given[size], True)

    for size in sizes:
        chain(layers, given[size], True)
        graphs.capture(("layers", size, 0), partial(keep, size))
    captured, found = dict(kept), []
    for turn in range(20):
        size = sizes[turn * 5 % len(sizes)]
        found.append((size, chain(layers, given[size], True)))
        graphs.run(("layers", size, 0), lambda: None)
        found.append((size, captured[size].clone()))
    assert all(torch.equal(one, expected[size]) for size, one in found)


def test_only_some_steps_fork(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    (layer, branch), *_ = build(arguments("qwen2_moe"), device)
    taken: list[torch.device] = []
    side = moe.side_stream

    def watched(device: torch.device) -> torch.cuda.Stream:
        taken.append(device)
        return side(device)

    monkeypatch.setattr(moe, "side_stream", watched)
    for tokens in (1, moe.BESIDE.start - 1, moe.BESIDE.start, moe.BESIDE.stop - 1, moe.BESIDE.stop):
        layer.forward(torch.zeros(tokens, layer.hidden_size, dtype=torch.bfloat16, device=device), branch, CONTEXT)
    assert taken == [device] * 2
    assert side(device).priority < torch.cuda.Stream().priority

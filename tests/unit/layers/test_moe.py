"""The layer with experts: against the blocks of transformers, its hooks, and every dispatcher that fits a kernel."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import Gemma4TextConfig, Llama4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.experts import Routing
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.kernels.activation import ACTS
from quire.kernels.experts import ref
from quire.kernels.experts.inputs import Case, make, make_biases, packed_by
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.experts_plan import DISPATCHERS
from quire.kernels.linear.onednn_support import missing_bf16
from quire.kernels.routing import uniform
from quire.kernels.select import select_kernels
from quire.layers import moe
from quire.layers.branch import Branch
from quire.layers.context import Build, Loads, StepContext
from quire.layers.moe import BESIDE, Experts, MoE, Router
from quire.models import names, qwen3_moe
from quire.plan.dispatchers import Hardware, resolve_moe
from quire.plan.kinds.blocks import operations
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.weights.units import load_units

from ...support.changed_args import with_experts
from ...support.fake_streams import fake_streams
from ...support.filled_models import experts_plan
from ...support.simulated_ranks import SIMULATED, owned
from ...support.tiny_models import EXPERTS, Tiny, as_family, configured, experts_of, hf_config, tiny_config

CORRECTIONS = (
    "e_score_correction_bias",
    "gate.e_score_correction_bias",
    "router.e_score_correction_bias",
    "expert_bias",
)  # names in transformers
CTX = StepContext(torch.arange(0), (), [])  # of the step, the feed-forward layers read which rows are live


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def prefix(args: ModelArgs) -> str:
    """The beginning of the parameters' names in the first layer with experts."""
    assert args.moe is not None
    return f"layers.{min(args.expert_layers)}.mlp."


def block(family: str) -> tuple[ModelArgs, Any]:
    """A random block of transformers, and its model's arguments."""
    config = hf_config(Tiny(family=family))
    made = experts_of(config)
    torch.manual_seed(0)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.normal_(0, 0.3)
    return parse_checkpoint_config(as_family(config.to_dict(), family)), made


def build_for(
    args: ModelArgs,
    dtype: torch.dtype = torch.float32,
    experts: tuple[int, ...] | None = None,
    linear: str | None = None,
) -> Build:
    kernels = select_kernels(
        "cpu",
        str(dtype).removeprefix("torch."),
        ops=operations(args),
        head_dim=args.attending[0].head_dim,
        forced={"linear": linear} if linear else None,
    )
    params = {param.name: param for param in layout(args, experts=experts)}
    linears = linear_plans(args, params.values(), kernels.choices)
    plan = experts_plan(args, str(dtype).removeprefix("torch."))
    return Build(dtype, torch.device("cpu"), kernels, params, linears, experts, moe=plan)


def filled(args: ModelArgs, theirs: Any, build: Build) -> MoE:
    """Our layer with the block's weights, packed."""
    assert args.moe is not None
    first = "gate_up_proj" if hasattr(theirs.experts, "gate_up_proj") else "up_proj"  # experts without gates
    matrices = getattr(theirs.experts, first)
    own = build.experts or range(len(matrices))
    router = theirs.gate if hasattr(theirs, "gate") else theirs.router
    stored = {
        "router.weight": router.weight,
        "experts.gate_up": matrices[list(own)],
        "experts.down": theirs.experts.down_proj[list(own)],
    }
    if args.moe.routing.logit_bias:
        stored["router.bias"] = router.bias
    if args.moe.biased:
        stored |= {f"experts.{name}_bias": getattr(theirs.experts, f"{name}_proj_bias") for name in ("gate_up", "down")}
    if args.moe.stored == "paired columns":  # as these experts have them in memory, too
        columns = [stored[name].mT for name in ("experts.gate_up", "experts.down")]
        halves = [(one[:, 0::2], one[:, 1::2]) for one in (columns[0], stored["experts.gate_up_bias"])]
        stored |= {"experts.gate_up": torch.cat(halves[0], 1), "experts.down": columns[1]}
        stored["experts.gate_up_bias"] = torch.cat(halves[1], 1)
    if args.moe.weigh_inputs:  # Llama 4: transposed in memory, too
        stored |= {name: stored[name].mT for name in ("experts.gate_up", "experts.down")}
    if args.moe.routing.correction:
        stored["router.correction"] = next(one for name, one in theirs.named_buffers() if name in CORRECTIONS)
    if args.moe.shared_size:
        shared = theirs.shared_expert if hasattr(theirs, "shared_expert") else theirs.shared_experts
        sides = ("gate_proj", "up_proj") if hasattr(shared, "gate_proj") else ("up_proj",)
        stored["shared.gate_up.weight"] = torch.cat([getattr(shared, side).weight for side in sides])
        stored["shared.down.weight"] = shared.down_proj.weight
    if args.moe.shared_gate:
        stored["shared_gate.weight"] = theirs.shared_expert_gate.weight
    return loaded(args, stored, build)


def loaded(args: ModelArgs, stored: dict[str, Tensor], build: Build) -> MoE:
    """Our layer with these weights, by their names below it; those of experts are stacked."""
    at = prefix(args)
    assert args.moe is not None
    made = MoE(args.moe, at[:-1], args.hidden_size, build)
    params = [param for param in build.params.values() if param.name.startswith(at)]
    assert {param.name.removeprefix(at) for param in params} == stored.keys()
    owners = {one.at: one for one in made.modules() if isinstance(one, Loads)}
    for unit in load_units(params):
        given = {raw.name: stored[f"{unit.module}.{raw.name}".removeprefix(at)] for raw in unit.tensors}
        if unit.module.endswith(".experts"):
            given = {name: weight[unit.place] for name, weight in given.items()}
        tensors = {name: weight.to(build.dtype, copy=True) for name, weight in given.items()}
        owners[unit.module].take(tensors, unit.place)
    return made


def branch_for(args: ModelArgs, build: Build) -> Branch:
    branch = Branch("mlp", args.layers[-1], args.norm, build)
    assert branch.before is not None
    branch.before.take({"weight": torch.empty(args.hidden_size).uniform_(0.5, 1.5)}, 0)
    return branch


# The block of Granite 4 in transformers is without its shared MLP: tests/unit/models compares the whole layer.
@pytest.mark.parametrize("family", [one for one in EXPERTS if not configured(one).beside and one != "granite_moe"])
def test_the_block_of_every_family(family: str) -> None:
    args, theirs = block(family)
    build = build_for(args)
    layer, branch = filled(args, theirs, build), branch_for(args, build)
    hidden = torch.randn(21, args.hidden_size)
    found = theirs(branch.read(hidden)[None])
    expected = hidden + (found[0] if isinstance(found, tuple) else found).view(hidden.shape)
    near = 2e-6 * float(expected.abs().max())  # sums that cancel: transformers itself is 3e-5 off float64 at one of 60
    torch.testing.assert_close(layer(hidden.clone(), branch, CTX), expected, rtol=1e-5, atol=max(1e-5, near))
    torch.testing.assert_close(layer(hidden[:1].clone(), branch, CTX), expected[:1], rtol=1e-5, atol=1e-5)
    assert layer(hidden[:0].clone(), branch, CTX).shape == (0, args.hidden_size)


class JoinedNorm:
    """A kernel of routing that norms and scores rows, too; it refuses more than two of them."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.asked = kernels, list[int]()
        self.route = kernels.routing.route

    def route_normed(
        self, x: Tensor, norm: tuple[Tensor, float], router: Any, routing: Routing, live: Tensor | None
    ) -> Any:
        if len(x) > 2:
            return None
        self.asked.append(len(x))
        weight, bias, correction, factors, _ = router
        normed = self.kernels.norm.rms_norm(x, *norm)
        return normed, self.route(self.kernels.linear.run(normed, weight, bias), correction, routing, live, factors)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_kernel_that_norms_scores_and_chooses(family: str) -> None:
    """It is asked for every step but those with adapters, of drawn experts, or of a layer whose steps are recorded."""
    args, theirs = block(family)
    build = build_for(args, linear="ref")
    layer, branch = filled(args, theirs, build), branch_for(args, build)
    hidden, live = torch.randn(3, args.hidden_size), torch.tensor([True, False])
    expected = layer(hidden.clone(), branch, CTX)
    dead = layer(hidden[:2].clone(), branch, replace(CTX, live=live))
    kernel = JoinedNorm(build.kernels)
    layer.router.kernel, layer.router.joins_norm = kernel, True
    assert torch.equal(layer(hidden.clone(), branch, CTX), expected) and not kernel.asked
    torch.testing.assert_close(layer(hidden[:2].clone(), branch, CTX), expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(hidden[:2].clone(), branch, replace(CTX, live=live)), dead)
    assert kernel.asked == [2, 2]
    adapters: Any = object()
    layer(hidden[:2].clone(), branch, replace(CTX, adapters=adapters))
    layer(hidden[:2].clone(), branch, replace(CTX, apart=True))
    layer.choose = partial(uniform, build.kernels.routing, layer.router.routing)
    layer(hidden[:2].clone(), branch, CTX)
    layer.choose, layer.router.joins_norm = None, False
    layer(hidden[:2].clone(), branch, CTX)
    assert kernel.asked == [2, 2]


def test_which_routers_join_their_norm() -> None:
    """Routers whose product may have any order, and that read what the experts read."""
    args, _ = block("qwen3_moe")
    build, at = build_for(args), f"{prefix(args)}router"
    assert args.moe is not None
    joined = replace(build.kernels.choices[0], op="routing", features=("norm of few rows",))
    kernels = replace(build.kernels, choices=(joined,))
    for features, choices, eps, expected in (
        (("norm",), kernels, 0.0, True),
        (("norm",), kernels, 1e-6, False),
        ((), kernels, 0.0, False),
        (("norm",), build.kernels, 0.0, False),
    ):
        linears = {at: structs.replace(build.linears[at], features=features)}
        own = replace(build, kernels=choices, linears=linears)
        assert Router(at, structs.replace(args.moe, router_eps=eps), own).joins_norm == expected


def changed(monkeypatch: pytest.MonkeyPatch, **experts: Any) -> ModelArgs:
    """The arguments of a small model with other experts, whose names have rows in the map."""
    more = tuple((f"x.{{i}}.{name}", f"layers.{{i}}.mlp.router.{name}", "") for name in ("scale", "expert_scale"))
    shared = tuple(
        (one.replace("mlp.", "mlp.shared."), to.replace("mlp.", "mlp.shared."), part)
        for one, to, part in names.GATED_MLP
    )
    monkeypatch.setattr(qwen3_moe, "NAME_MAP", (*qwen3_moe.NAME_MAP, *more, *shared))
    return with_experts(parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe"))), **experts)


def randomized(made: Any) -> Any:
    for tensor in made.parameters():
        tensor.normal_(0, 0.3)
    return made


def test_the_weight_of_the_one_expert_multiplies_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Llama 4; the shared expert reads the input as it is."""
    config = Llama4TextConfig(hidden_size=64, intermediate_size=24, num_local_experts=8, num_experts_per_tok=1)
    theirs = randomized(Llama4TextMoe(config))
    routing = Routing(num_experts=8, top_k=1, scoring="sigmoid")
    args = changed(monkeypatch, routing=routing, expert_size=24, shared_size=24, weigh_inputs=True)
    build, shared = build_for(args), theirs.shared_expert
    layer = loaded(
        args,
        {
            "router.weight": theirs.router.weight,
            "experts.gate_up": theirs.experts.gate_up_proj.mT,
            "experts.down": theirs.experts.down_proj.mT,
            "shared.gate_up.weight": torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
            "shared.down.weight": shared.down_proj.weight,
        },
        build,
    )
    branch, hidden = branch_for(args, build), torch.randn(21, args.hidden_size)
    expected = hidden + theirs(branch.read(hidden))[0]
    torch.testing.assert_close(layer(hidden.clone(), branch, CTX), expected, rtol=1e-5, atol=1e-5)


def test_a_router_with_a_norm_of_its_own_and_scales_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Gemma 4: the router reads the residual stream, the experts its norm. Rows that are not live choose none."""
    config = Gemma4TextConfig(hidden_size=64, moe_intermediate_size=24, num_experts=8, top_k_experts=3)
    router, experts = randomized(Gemma4TextRouter(config)), randomized(Gemma4TextExperts(config))
    args = changed(
        monkeypatch,
        routing=Routing(num_experts=8, top_k=3, scoring="softmax", normalize=True, expert_scale=True),
        expert_size=24,
        act="gelu_tanh",
        router_eps=config.rms_norm_eps,
    )
    build = build_for(args)
    layer = loaded(
        args,
        {
            "router.weight": router.proj.weight,
            "router.scale": router.scale,
            "router.expert_scale": router.per_expert_scale,
            "experts.gate_up": experts.gate_up_proj,
            "experts.down": experts.down_proj,
        },
        build,
    )
    branch, hidden = branch_for(args, build), 3 * torch.randn(21, args.hidden_size)
    _, weights, ids = router(hidden)
    expected = hidden + experts(branch.read(hidden), ids, weights)
    torch.testing.assert_close(layer(hidden.clone(), branch, CTX), expected, rtol=1e-5, atol=1e-5)
    live = torch.arange(21) < 13
    some = layer(hidden.clone(), branch, replace(CTX, live=live))
    torch.testing.assert_close(some, torch.where(live[:, None], expected, hidden), rtol=1e-5, atol=1e-5)


def test_ranks_with_a_part_of_the_experts_sum_to_the_whole() -> None:
    args, theirs = block("qwen3_moe")
    hidden = torch.randn(13, args.hidden_size)
    branch = branch_for(args, build_for(args))
    expected = theirs(branch.read(hidden)[None])[0]
    parts = [
        filled(args, theirs, build_for(args, experts=own))(hidden.clone(), branch, CTX) - hidden
        for own in ((0, 1, 5), (7, 2), (3, 6, 4))
    ]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-5)
    assert all(part.abs().max() > 0.1 for part in parts)


def test_what_is_routed_can_be_seen_and_replaced() -> None:
    args, theirs = block("deepseek_v3")
    build = build_for(args)
    layer, branch = filled(args, theirs, build), branch_for(args, build)
    hidden, seen = torch.randn(9, args.hidden_size), []
    plain = layer(hidden.clone(), branch, CTX)
    layer.on_routing = lambda weights, ids: seen.append((weights, ids))
    assert torch.equal(layer(hidden.clone(), branch, CTX), plain)
    _, weights, ids = theirs.gate(branch.read(hidden))
    for ours, wanted in zip(seen.pop(), (weights.sort(1).values, ids.sort(1).values), strict=True):
        torch.testing.assert_close(ours.sort(1).values, wanted.to(ours.dtype), rtol=1e-6, atol=1e-6)
    assert args.moe is not None
    layer.choose = partial(uniform, build.kernels.routing, args.moe.routing)
    changed = layer(hidden.clone(), branch, CTX)
    weights, ids = seen.pop()
    assert not torch.equal(changed, plain)
    layer.choose, layer.on_routing = lambda x, live: (weights, ids), None
    assert torch.equal(layer(hidden.clone(), branch, CTX), changed)


def logged(layer: MoE, log: list[str]) -> None:
    """Write down what the layer launches; its experts join where a kernel with that feature does."""
    kernel, add = layer.experts.kernel, layer.shared.down.add if layer.shared else None

    def run(*given: Any) -> Tensor:
        log.append("products")
        for join in given[6:]:
            join()
        log.append("sum")
        y: Tensor = kernel.run(*given[:6])
        return y

    layer.experts.kernel = SimpleNamespace(run=run)
    layer.on_routing = lambda *_: log.append("router")
    if layer.shared is not None:
        layer.shared.down.add = lambda *given: log.append("shared") or add(*given)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("family", "tokens", "forks"),
    [
        ("deepseek_v2", 5, True),
        ("qwen2_moe", 256, True),
        ("deepseek_v2", 4, False),
        ("deepseek_v2", 257, False),
    ],
)
def test_shared_experts_run_beside_the_routed_ones(
    family: str, tokens: int, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the norm alone, and only the last kernel of the others waits for them."""
    args, theirs = block(family)
    build = build_for(args)
    layer, branch = filled(args, theirs, build), branch_for(args, build)
    hidden = torch.randn(tokens, args.hidden_size)
    expected = layer(hidden.clone(), branch, CTX)
    side, log = fake_streams(monkeypatch)
    monkeypatch.setattr(moe, "side_stream", lambda device: side)
    logged(layer, log)
    layer.forks = True
    read = branch.read
    monkeypatch.setattr(branch, "read", lambda x: log.append("norm") or read(x))
    assert torch.equal(layer(hidden.clone(), branch, CTX), expected)
    if forks:
        assert log == [
            "norm",
            "side waits for main",
            "router",
            "in side",
            "shared",
            "out of side",
            "products",
            "main waits for side",
            "sum",
        ]
    else:
        assert log == ["norm", "router", "shared", "products", "sum"]
    wide = torch.randn(16, 2 * args.hidden_size)[:, ::2]  # the experts' kernel would copy it before the join
    log.clear()
    torch.testing.assert_close(layer(wide, branch, CTX), layer(wide.contiguous(), branch, CTX))
    assert log[:5] == ["norm", "router", "shared", "products", "sum"]


def test_a_layer_that_fails_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    args, theirs = block("deepseek_v2")
    build = build_for(args)
    layer, branch = filled(args, theirs, build), branch_for(args, build)
    side, log = fake_streams(monkeypatch)
    monkeypatch.setattr(moe, "side_stream", lambda device: side)
    layer.forks, layer.experts.kernel = True, SimpleNamespace()
    with pytest.raises(AttributeError):
        layer(torch.randn(BESIDE[0], args.hidden_size), branch, CTX)
    assert log == ["side waits for main", "in side", "out of side", "main waits for side"]


@pytest.mark.parametrize(
    ("family", "device", "kernel", "forks"),
    [
        ("deepseek_v2", "cuda", "triton", True),
        ("qwen3_moe", "cuda", "triton", False),
        ("deepseek_v2", "cuda", "grouped", False),
        ("deepseek_v2", "cpu", "triton", False),
        ("deepseek_v2", "cpu", "cpu", False),
    ],
)
def test_which_layers_fork(family: str, device: str, kernel: str, forks: bool) -> None:
    """Layers with shared experts, on a GPU, whose kernel can join late."""
    args = parse_checkpoint_config(tiny_config(Tiny(family=family)))
    on = "cpu" if kernel == "cpu" else "cuda"
    plan = experts_plan(args, "bfloat16", on, kernel, lambda need: "")
    build = replace(build_for(args, torch.bfloat16), device=torch.device(device), moe=plan)
    assert args.moe is not None
    assert MoE(args.moe, prefix(args)[:-1], args.hidden_size, build).forks == forks


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("linear", [None, "cpu"])
def test_scores_are_rounded_where_the_family_does(exact: bool, linear: str | None) -> None:
    """In bfloat16: float32 scores of two experts differ, their rounded ones do not, so the lower number wins."""
    if linear == "cpu" and (why := missing_bf16()):
        pytest.skip(why)
    args, theirs = block("qwen3_moe")
    args = with_experts(args, router_float=exact)
    theirs.gate.weight.zero_()
    theirs.gate.weight[3:5, 0] = 1.0
    theirs.gate.weight[4, 1] = 2.0**-9
    layer = filled(args, theirs, build_for(args, torch.bfloat16, linear=linear))
    x = torch.zeros(1, args.hidden_size, dtype=torch.bfloat16)
    x[:, :2] = 1
    _, ids = layer.router(x)
    assert ids[0, 0] == (4 if exact else 3)


@pytest.mark.parametrize("act", ACTS)
def test_a_layer_with_biased_experts(act: str) -> None:
    """Two ranks have a half of every expert each; the first has the bias of the down projection."""
    args = with_experts(parse_checkpoint_config(tiny_config(Tiny(family="gpt_oss"))), act=act)
    assert args.moe is not None and args.moe.biased
    num, width, hidden = args.moe.routing.num_experts, args.moe.expert_size, args.hidden_size
    case = Case(6, num, 2, hidden, width)
    (x, weights, ids, gate_up, down), (first, second) = make(case, torch.float32), make_biases(case, torch.float32)
    expected = ref.run(x, weights, ids, packed_by(ref, gate_up, down, act, (first, second)))
    build, found = build_for(args), torch.zeros_like(x)
    whole = Experts(f"{prefix(args)}experts", args.moe, build)
    assert whole.destination() is None
    for number, part in enumerate(torch.arange(width).chunk(2)):
        shapes = {"gate_up": (num * 2 * len(part), hidden), "down": (num * hidden, len(part))}
        names = {f"{prefix(args)}experts.{name}": shape for name, shape in shapes.items()}
        params = {name: structs.replace(build.params[name], shape=shape) for name, shape in names.items()}
        layer = Experts(f"{prefix(args)}experts", args.moe, replace(build, params=params))
        rows = torch.cat((part, width + part))
        for place in range(num):
            given = {"gate_up": gate_up[place][rows], "gate_up_bias": first[place][rows], "down": down[place][:, part]}
            layer.take(given | ({} if number else {"down_bias": second[place]}), place)
        found += layer(x, weights, ids, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def pairs() -> list[tuple[str, str]]:
    """Every dispatcher and kernel that a plan would let run together on a CPU, were all kernels there."""
    hardware = Hardware(device="cpu", kernels=(("grouped", ""), ("cpu", ""), ("ref", "")))
    args = parse_checkpoint_config(tiny_config(Tiny(family="mixtral")))
    found = []
    for topology in (Parallel(tp=2, experts=True), Parallel(dp=2, experts=True)):
        for dispatcher in DISPATCHERS:
            for kernel, _ in hardware.kernels:
                try:
                    asked = {"dispatcher": dispatcher, "experts": kernel}
                    resolve_moe(args, None, topology, hardware, "prefill", asked)
                    found.append((dispatcher, kernel))
                except ConfigError:
                    continue
    return found


def test_the_pairs() -> None:
    assert pairs() == [
        *(("none", kernel) for kernel in ("grouped", "cpu", "ref")),
        *(("all-gather", kernel) for kernel in ("grouped", "cpu", "ref")),
    ]


@pytest.mark.parametrize("counts", [(5,), (3, 0), (0, 4), (4, 0, 1, 7), (0, 0, 0, 2)], ids=str)
@pytest.mark.parametrize(("dispatcher", "kernel"), pairs())
def test_every_pair_that_fits_is_the_layer(dispatcher: str, kernel: str, counts: tuple[int, ...]) -> None:
    """Ranks with uneven numbers of tokens and of experts, some with none; routing that misses whole ranks."""
    module = importlib.import_module(f"quire.kernels.experts.{kernel}")
    for spread in ("even", "few"):
        x, weights, ids, gate_up, down = make(Case(sum(counts), 6, 2, 32, 24, spread), torch.float32)
        tokens = list(zip(*(part.split(counts) for part in (x, weights, ids)), strict=True))
        owners = owned(6, len(counts))
        packed = [packed_by(module, gate_up[own], down[own]) for own in owners]
        found = SIMULATED[dispatcher](tokens, packed, owners, module)
        expected: Tensor = ref.run(x, weights, ids, ExpertWeights(gate_up, down))
        assert [len(y) for y in found] == list(counts)
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
